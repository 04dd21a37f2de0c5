"""The strategy parameter_server: servers, workers, what they send each other."""
