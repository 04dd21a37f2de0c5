"""`data.share: auto`: slower ranks get fewer samples of each global batch."""

from toolkit.registry import Plugin

PLUGIN = Plugin("balance", hooks={"balance": "toolkit.plugins.balance.shares:build_balance"})
