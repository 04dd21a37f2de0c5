"""show the placement that this process derives, and from what"""

import os
import socket
from argparse import ArgumentParser, Namespace
from typing import Any

from toolkit.cli import arguments, tables

EXAMPLES = (
    ("toolkit placement", "which rank this process is, and by which variables"),
    ("toolkit placement --json", "the same as JSON"),
)


def add_arguments(parser: ArgumentParser) -> None:
    tables.add_wide(parser)
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    from dataclasses import asdict

    from toolkit.plugins.site.checks import devices
    from toolkit.slurm import placement

    place = placement.derive(os.environ, socket.gethostname())
    facts = {**vars(place), "sources": dict(place.sources), "launch_key": placement.launch_key(os.environ)}
    facts["environment"] = placement.environment(place, os.environ, 1)
    facts["interfaces"] = [asdict(i) for i in devices.interfaces()]
    facts["infiniband"] = [asdict(p) for p in devices.infiniband_ports()]
    if args.json:
        print(arguments.as_json(facts))
    else:
        print(tables.Table(_rows(facts), tables.width(args)), *(f"note: {note}" for note in place.notes), sep="\n")


def _rows(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    names = ("launcher", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "nodes", "host")
    sources = facts["sources"]
    rows = [("", "VALUE", "FROM")]
    rows += [(name, str(facts[name]), str(sources.get(name, ""))) for name in names]
    rows += [(name, value, "set for the rank") for name, value in sorted(facts["environment"].items())]
    for interface in facts["interfaces"]:
        mbps = interface["speed_mbps"]
        speed = f", {mbps / 1000:g} Gb/s" if mbps else ""
        rows.append(("interface", interface["name"], f"{interface['operstate']}{speed}"))
    for port in facts["infiniband"]:
        rows.append(("infiniband", f"{port['device']}:{port['port']}", f"{port['rate_gbps']:g} Gb/s"))
    return rows
