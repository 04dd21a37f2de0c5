"""A first project of one's own."""

from toolkit.registry import Plugin

PLUGIN = Plugin("new", commands={"new": "toolkit.plugins.new.command"})
