"""The strategy parameter_server: see `toolkit.plugins.parameter_server.roles`."""
