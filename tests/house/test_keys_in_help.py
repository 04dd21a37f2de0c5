"""The keys of the config in the help of all commands that take some."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.command import Command
from tests.unit.cli.test_keys import folder  # noqa: F401
from toolkit.cli.keys import FIRST
from toolkit.config import all_keys

OWN = {"params.width", "params.dropout", "params.block.heads"}


@pytest.mark.parametrize("name", ["submit", "run", "supervise", "resume-check"])
def test_every_key_is_listed_within_the_width_of_a_terminal(name: str, folder: Path, command: Command) -> None:
    (folder / "c.yaml").write_text(f"job: job.py\nparams: {{width: 3}}\nname: {'n' * 99}\nnotify: [{'x' * 150}]\n")
    found = command(name, "c.yaml", "--help-all").splitlines()
    assert max(len(line) for line in found if "xxx" not in line and "nnn" not in line) <= 80
    assert names(found) == OWN | set(all_keys()) - {"params"}


def test_the_short_page_explains_first_and_set_keys_and_names_all_others(folder: Path, command: Command) -> None:
    first = {f"{section}.{name}".lstrip(".") for section, words in FIRST.items() for name in words.split()}
    assert 25 <= len(first) <= 35
    assert first < set(all_keys())
    found = command("submit", "c.yaml", "train.pruning.amount=0.5", "-h").splitlines()
    assert max(map(len, found)) <= 80
    rest = found.index("More keys, by section; --help-all in place of --help shows what they are for:")
    assert names(found[:rest]) == OWN | first | {"train.pruning.amount"}
    listed = set[str]()
    for section, words in re.findall(r"^  ([a-z][a-z ]+): ((?:.|\n    )*)", "\n".join(found[rest:]), re.MULTILINE):
        prefix = "" if section == "the run" else f"{section}."
        listed |= {f"{prefix}{word}" for word in re.split(r",\s+", words)}
    assert listed == set(all_keys()) - first - {"train.pruning.amount", "params"}


def names(found: list[str]) -> set[str]:
    """Return the keys that have a line of their own."""
    return {line[2:].partition(":")[0] for line in found if line[:2] in ("  ", "* ") and line[2:3].strip()}
