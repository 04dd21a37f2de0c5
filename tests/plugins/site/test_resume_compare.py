"""resume-check: the places of its kills, and the comparison of traces line by line."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.base.errors import RequestError
from toolkit.plugins.site.resume_check import FARTHEST, choose_interruptions
from toolkit.plugins.site.resume_compare import (
    EPOCH_END,
    FIRST_EPOCH,
    LATER_EPOCH,
    InterruptionPlan,
    TraceRecord,
    _at,
    _by_position,
    resume_points,
)
from toolkit.ranks.batch import Batch
from toolkit.train.step_digests import StepDigests


def of_epochs(*lengths: int) -> dict[int, str]:
    epochs = [number for number, length in enumerate(lengths) for _ in range(length)]
    lines: Any = {step: {0: {"epoch": epoch}} for step, epoch in enumerate(epochs)}
    return resume_points(TraceRecord(lines, {}, {}, []))


def strikes(
    seed: int, *lengths: int, plan: InterruptionPlan | None = None, every: int | None = None, ranks: int = 4
) -> list[dict[str, Any]]:
    return choose_interruptions(
        plan or InterruptionPlan(), ranks, of_epochs(*lengths), sum(lengths), every, random.Random(seed)
    )


def test_any_rank_is_struck() -> None:
    assert {each["rank"] for seed in range(60) for each in strikes(seed, 60)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("lengths", "every", "expected"),
    [
        ([20, 20, 20], None, [FIRST_EPOCH, LATER_EPOCH, EPOCH_END]),
        ([31, 29], None, [FIRST_EPOCH, LATER_EPOCH, EPOCH_END]),
        ([59, 1], None, [FIRST_EPOCH]),  # no step is left behind the end
        ([58, 2], None, [FIRST_EPOCH, EPOCH_END]),
        ([60], None, [FIRST_EPOCH]),
        ([1] * 60, None, [EPOCH_END]),
        ([2] * 30, None, [FIRST_EPOCH, LATER_EPOCH, EPOCH_END]),
        ([20, 20, 20], 10, [FIRST_EPOCH, LATER_EPOCH, EPOCH_END]),
        ([20, 20, 20], 20, [EPOCH_END]),
        ([20, 20, 20], 7, [FIRST_EPOCH, LATER_EPOCH]),
        ([3], None, [FIRST_EPOCH]),
    ],
)
def test_a_kill_follows_a_checkpoint_of_each_place_that_there_is(
    lengths: list[int], every: int | None, expected: list[str]
) -> None:
    found, where = of_epochs(*lengths), set[str]()
    for seed in range(100):
        chosen = strikes(seed, *lengths, every=every)
        saved = [each["saved"] for each in chosen]
        assert saved == sorted({*saved})
        assert {found[step] for step in saved} <= {*expected}
        where |= {found[step] for step in saved}
        for each, following in zip(chosen, [*saved[1:], sum(lengths) - 1], strict=True):
            assert each["saved"] <= each["step"] < min(each["saved"] + FARTHEST, following)
            assert every is None or each["saved"] % every == 0
    assert where == {*expected}


def test_a_step_that_is_asked_for_is_struck_after_a_checkpoint_soon_before_it() -> None:
    (one,) = strikes(1, 60, plan=InterruptionPlan(step=25))
    assert one["step"] == 25
    assert 25 - FARTHEST < one["saved"] <= 25
    (at_the_users_pace,) = strikes(1, 60, plan=InterruptionPlan(step=25), every=1000)
    assert (at_the_users_pace["step"], at_the_users_pace["saved"]) == (25, 0)


@pytest.mark.parametrize(
    ("at", "steps", "every", "says"),
    [
        (20, 20, None, "ended by itself after 20 of the 60 steps, and --at must be within 1..18"),
        (19, 20, None, "ended by itself after 20 of the 60 steps, and --at must be within 1..18"),
        (None, 2, None, "ended by itself after 2 of the 60 steps, and 3 are needed"),
        (None, 0, None, "has recorded no step.*toolkit.start"),
        (None, 60, 200, "checkpoint.every_steps=200: no checkpoint of these 60 steps comes before a kill"),
    ],
)
def test_a_check_that_could_prove_nothing_is_refused(at: int | None, steps: int, every: int | None, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        strikes(1, steps, plan=InterruptionPlan(step=at), every=every)


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
    trace = StepDigests("{}", session, {})
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
    assert _at(mine, other, InterruptionPlan(), (), exact=True) == {"inputs": f"rank 0{expected}"}


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
    assert _at(mine, other, InterruptionPlan(), (), exact=True) == {kind: f"rank 0{expected}"}
