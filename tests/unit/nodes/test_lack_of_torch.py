"""Nodes on which torch cannot be imported."""

import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import RankFailure
from toolkit.run.supervise.conclude import note_lack_of_torch
from toolkit.run.supervise.supervisor_components import Context


def at_launch(has_torch: dict[str, bool], heard: dict[int, str], *, event: object = None) -> list[bool]:
    """Return which of the failures on nodes a and b of a, b and c count as ranks that could not be started."""
    events: SimpleQueue[Any] = SimpleQueue()
    if event is not None:
        events.put(event)
    context = SimpleNamespace(agents=SimpleNamespace(has_torch=has_torch), events=events, asked=lambda: None)
    attempt = Attempt(1, time.time(), Allocation(("a", "b", "c"), (1, 1, 1), 1), heard=heard)
    attempt.fail(
        RankFailure(0, "a", "OSError: libtorch.so", 1.0),
        RankFailure(1, "b", "ValueError: x", 1.1),
        RankFailure(None, "elsewhere", "the store host ended", 1.2),
    )
    note_lack_of_torch(cast(Context, context), attempt)
    assert attempt.failures[2].rank is None
    return [failure.at_launch for failure in attempt.failures]


@pytest.mark.parametrize(
    ("has_torch", "heard", "wanted"),
    [
        ({"a": False, "b": True, "c": True}, {}, [True, False, False]),
        ({"a": False, "b": False, "c": True}, {}, [True, True, False]),  # most nodes: ending.unfit_nodes excuses them
        ({"a": False, "b": False, "c": False}, {}, [False, False, False]),
        ({"a": True, "b": True, "c": True}, {}, [False, False, False]),
        ({"a": False, "b": True}, {0: "a"}, [False, False, False]),  # it has trained: torch was there
        ({}, {}, [False, False, False]),  # as for ranks over MPI
    ],
)
def test_a_rank_could_not_start_where_only_its_node_lacks_torch(
    has_torch: dict[str, bool], heard: dict[int, str], wanted: list[bool]
) -> None:
    assert at_launch(has_torch, heard) == wanted


def test_a_node_that_imports_torch_still_is_waited_for_but_not_against_a_signal() -> None:
    has_torch = {"a": False}
    assert at_launch(has_torch, {}, event="a signal") == [False, False, False]
    threading.Timer(0.2, lambda: has_torch.update(b=True)).start()
    assert at_launch(has_torch, {}) == [True, False, False]
