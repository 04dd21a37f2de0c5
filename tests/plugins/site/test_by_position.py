"""Lines of traces: batches of every shape, compared across numbers of ranks, and the names of what differs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.plugins.site.resume_compare import CheckPlan, _at, _by_position
from toolkit.ranks.batch import Batch
from toolkit.train.trace import StepTrace

PAIR = {"positions": [4, 5], "samples": [7, 8], "inputs": ["a", "b"], "targets": ["c", "d"]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (PAIR, {4: (7, "a", "c"), 5: (8, "b", "d")}),
        ({name: PAIR[name] for name in ("positions", "samples", "inputs")}, {4: (7, "a", None), 5: (8, "b", None)}),
        ({**PAIR, "inputs": ["packed"]}, {4: (7, None, "c"), 5: (8, None, "d")}),
        ({"samples": [], "inputs": ["x", "y", "z"]}, {}),
    ],
    ids=["pairs", "nested", "packed", "another loader"],
)
def test_a_batch_of_any_shape_is_compared_by_what_is_known_of_it(line: dict[str, Any], expected: object) -> None:
    assert _by_position({0: line}) == expected


def test_a_batch_with_a_scalar_beside_its_rows_has_one_digest(tmp_path: Path) -> None:
    """Before, the scalar ended the trace with "iteration over a 0-d tensor"."""
    session: Any = SimpleNamespace(attempt=1, rank=0, run_dir=tmp_path)
    trace = StepTrace("{}", session, {})
    rows = Batch({"rows": torch.ones(2, 3)}, torch.tensor([4, 5]), 2)
    with_scalar = Batch({"rows": torch.ones(2, 3), "scale": torch.tensor(2.0)}, torch.tensor([4, 5]), 2)
    digests = []
    for batch in (rows, with_scalar):
        trace.take_batch(1, batch, [7, 8])
        digests.append(trace._line["inputs"])
    assert [len(each) for each in digests] == [2, 1]


@pytest.mark.parametrize(
    ("samples", "ours", "theirs", "expected"),
    [
        ([], ["x", "y"], ["x", "z"], " (1 of 2 tensors, the first of them 1)"),
        ([], ["x"], ["x", "z"], ""),
        ([7, 8], ["packed"], ["other"], " (1 of 1 tensors, the first of them 0)"),
        ([7, 8], ["a", "b"], ["a", "c"], " (1 of 2 samples, the first of them 8)"),
    ],
    ids=["another loader", "other numbers of tensors", "packed", "our loader"],
)
def test_inputs_that_differ_are_named_by_sample_or_tensor(
    samples: list[int], ours: list[str], theirs: list[str], expected: str
) -> None:
    """Before, batches of a DataLoader ended the comparison with an IndexError exactly where they differed."""
    mine, other = ({0: {"samples": samples, "inputs": each, "logged": {}}} for each in (ours, theirs))
    assert _at(mine, other, CheckPlan(), (), exact=True) == {"inputs": f"rank 0{expected}"}


@pytest.mark.parametrize(
    ("kind", "ours", "theirs", "expected"),
    [
        (
            "state",
            {"scheduler.metric": "0.71", "scheduler.t": "3"},
            {"scheduler.metric": "0.69", "scheduler.t": "3"},
            " (scheduler.metric: 0.71 and 0.69)",
        ),
        ("state", {"replay": "#0a0b0c0d"}, {"replay": "#0a0b0c0e"}, " (replay)"),
        ("state", {"seen[0]": "1"}, {"seen[0]": "1", "seen[1]": "'x'"}, " (seen[1]: absent and 'x')"),
        ("logged", {"acc": (0.5).hex()}, {"acc": (0.25).hex()}, " (acc: 0.5 and 0.25)"),
        ("weights", {"0.bias": "0a0b0c0d"}, {"0.bias": "0a0b0c0e"}, " (0.bias)"),
    ],
    ids=["a number", "a digest", "one more", "a figure", "weights"],
)
def test_state_that_differs_is_named_by_key_with_both_values(
    kind: str, ours: dict[str, str], theirs: dict[str, str], expected: str
) -> None:
    mine, other = ({0: {"samples": [], "logged": {}, kind: each}} for each in (ours, theirs))
    assert _at(mine, other, CheckPlan(), (), exact=True) == {kind: f"rank 0{expected}"}
