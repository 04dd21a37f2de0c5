"""The monitor of a node while ranks work: what the job uses there, and what is wrong with the node."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "monitor",
    hooks={
        "monitor_node": "toolkit.plugins.monitor.node_monitor:MonitorProcess",
        "open_gpus": "toolkit.plugins.monitor.drivers:open_gpus",
        "job_usage": "toolkit.plugins.monitor.job_usage:JobUsageRecorder",
        "efficiency": "toolkit.plugins.monitor.efficiency:of_run",
        "efficiency_rows": "toolkit.plugins.monitor.efficiency:rows",
        "efficiency_lines": "toolkit.plugins.monitor.efficiency:lines",
        "usage_curves": "toolkit.plugins.monitor.efficiency:curves",
    },
)
