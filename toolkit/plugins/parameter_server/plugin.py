"""The strategy parameter_server: some ranks keep the weights, the others compute gradients."""

from toolkit.registry import Plugin, StrategyTraits

PLUGIN = Plugin(
    "parameter_server",
    strategies={"parameter_server": "toolkit.plugins.parameter_server.roles:build"},
    sections={"strategy.parameter_server": "toolkit.plugins.parameter_server.config:ParameterServerConfig"},
    traits={"parameter_server": StrategyTraits(same_state=True)},
    checks={"parameter_server": "toolkit.plugins.parameter_server.checks:ParameterServerChecks"},
    waits={"toolkit.plugins.parameter_server.mail:receive": "waiting for a message"},
)
