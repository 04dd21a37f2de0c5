"""`toolkit report`: one HTML file about runs, which needs no network and runs no script."""
