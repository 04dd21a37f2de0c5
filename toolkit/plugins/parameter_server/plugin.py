"""The strategy parameter_server: some ranks keep the weights, the others compute gradients."""

from toolkit.registry import Plugin

PLUGIN = Plugin("parameter_server", strategies={"parameter_server": "toolkit.plugins.parameter_server.roles:build"})
