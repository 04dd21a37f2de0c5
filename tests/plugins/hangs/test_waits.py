"""The places where ranks wait."""

from __future__ import annotations

import json
import subprocess
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path

import pytest

from toolkit import registry
from toolkit.hang import stacks
from toolkit.nodes.agent.reports import Standing
from toolkit.plugins.hangs.investigation import COMMAND, blame
from toolkit.plugins.hangs.stack_digest import WAITS, from_json


@pytest.mark.parametrize("place", [*WAITS, *registry.waits()])
def test_the_places_where_ranks_wait_are_where_they_are_said_to_be(place: str) -> None:
    module, _, function = place.partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert f"def {function}(" in Path(str(spec.origin)).read_text()


def test_a_rank_in_a_wait_that_a_plugin_brings_is_not_to_blame(tmp_path: Path) -> None:
    for rank, place in enumerate(
        ["/x/site-packages/lab_plugin/mail.py:receive", "/x/site-packages/lab_plugin/mail.py:send"]
    ):
        file, _, name = place.partition(":")
        text = f'Thread 0x1 (most recent call first):\n  File "{file}", line 1 in {name}\n{stacks.ANSWERED}'
        stacks.stack_path(tmp_path, rank).write_text(text)
    standings = [astuple(Standing(rank, "in a step", 7, 40.0, False)) for rank in range(2)]
    waits = {"lab_plugin.mail:receive": "waiting for a message"}
    request = {"folder": str(tmp_path), "standings": standings, "waits": waits}
    done = subprocess.run(COMMAND, input=json.dumps(request), capture_output=True, text=True, check=True)
    assert blame(from_json(json.loads(done.stdout))) == ([1], "in a step, 40 s; 1 other waiting for a message")
