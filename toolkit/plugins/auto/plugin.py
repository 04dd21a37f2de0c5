"""The strategy auto: ddp, zero or fsdp, by what the device has room for."""

from toolkit.registry import Plugin

PLUGIN = Plugin("auto", strategies={"auto": "toolkit.plugins.auto.strategy:build"})
