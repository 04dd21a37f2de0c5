"""The rules by which a log is read: tables in ``rules/*.toml``.

There is one file for each group of causes. A table's name is the rule's id without its group::

    [ib_port_down]                        # nccl.ib_port_down, in nccl.toml
    tier = "decisive"                     # "plain" if left out
    lines = ['Got async event : port error']
    cause = "An InfiniBand port went down."
    next = "Have the port looked at."
    recurs = "always"                     # no restart helps; "on_node": unless the node alone is at fault

``lines`` are regular expressions. A rule fits a log if any of them is found in it; ``^`` is the start of a
line, behind the labels that launchers put before it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path


class Tier(IntEnum):
    """How much a rule tells about the cause. Of several rules that fit, those of the lowest tier count."""

    DECISIVE = 0  #: names what failed: a device, a port, a disk, a kill by the kernel
    PLAIN = 1  #: an error that explains itself
    BROAD = 2  #: says what happened to the process, not why: a time-out, a signal
    CONSEQUENCE = 3  #: another process ended first


@dataclass(frozen=True)
class Rule:
    """One kind of failure: how it is recognised, what it means, what to do."""

    id: str
    tier: Tier
    lines: tuple[re.Pattern[str], ...]
    cause: str
    next: str
    recurs: str | None = None  #: ``always``, ``on_node``, or None where a restart may help


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return all rules, in the order of their files and tables."""
    files = sorted(Path(__file__).with_suffix("").glob("*.toml"))
    return tuple(
        Rule(
            f"{file.stem}.{name}",
            Tier[fields.get("tier", "plain").upper()],
            tuple(re.compile(line, re.MULTILINE) for line in fields["lines"]),
            fields["cause"],
            fields["next"],
            fields.get("recurs"),
        )
        for file in files
        for name, fields in tomllib.loads(file.read_text(encoding="utf-8")).items()
    )


#: An exception that no rule of the files fits. Its own text is the cause.
EXCEPTION = Rule(
    "py.exception",
    Tier.BROAD,
    (),
    "The program ended with an exception of its own.",
    "Mend the program at the line that `from:` names.",
)


@cache
def rule(rule_id: str) -> Rule:
    """Return the rule of an id. Raises KeyError if there is none."""
    return {rule.id: rule for rule in (*all_rules(), EXCEPTION)}[rule_id]
