"""`notify`: a command of the user that is told how a run has ended."""

from toolkit.registry import Plugin

PLUGIN = Plugin("notify", hooks={"run_ended": "toolkit.plugins.notify.notify:notify"})
