"""`toolkit watch`: runs on the screen, kept up to date."""
