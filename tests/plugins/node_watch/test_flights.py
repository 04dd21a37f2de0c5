"""The first collective that not all ranks have called alike, in what torch's flight recorder has written."""

import pickle
from pathlib import Path

import pytest

from toolkit import hang
from toolkit.plugins.node_watch.investigation import calls_of, first_difference


def written(folder: Path, rank: int, calls: str) -> None:
    """Write a recording: ``a2`` is an all_reduce at line 2, ``b3`` a broadcast at line 3."""
    names = {"a": "gloo:all_reduce", "b": "gloo:broadcast"}
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "is_p2p": False,
            "collective_seq_id": number,
            "profiling_name": names[call[0]],
            "input_sizes": [[5]],
            "frames": [
                {"filename": "/x/site-packages/torch/distributed/c10d.py", "line": 9, "name": "f"},
                {"filename": "/x/train.py", "line": int(call[1:]), "name": "<module>"},
            ],
        }
        for number, call in enumerate(calls.split(), 1)
    ]
    hang.flight_path(folder, rank).write_bytes(pickle.dumps({"entries": entries}))


@pytest.mark.parametrize(
    ("calls", "odd", "line"),
    [
        pytest.param(
            ["a2 a2 b7", "a2 a2 a2 a2", "a2 a2 a2 a2"],
            0,
            "collective 3 was broadcast (train.py:7) on rank 0, and all_reduce (train.py:2) on rank 1",
            id="a call of one rank, where it waits",
        ),
        pytest.param(
            ["a2 a7 a2 a2 a2", "a2 a2 a2 a2 b9", "a2 a2 a2 a2 b9"],
            0,
            "collective 2 was all_reduce (train.py:7) on rank 0, and all_reduce (train.py:2) on rank 1",
            id="a call of one rank that has paired up with the next of the others",
        ),
        pytest.param(
            ["a2 a7 a2 a2", "a2 a2 a2 b9"],
            0,
            "collective 2 was all_reduce (train.py:2) on rank 1, and all_reduce (train.py:7) on rank 0",
            id="the same on two ranks",
        ),
        pytest.param(
            ["a2 a2 a2", "a2 a2 b9", "a2 a2 a2"],
            1,
            "collective 3 was broadcast (train.py:9) on rank 1, and all_reduce (train.py:2) on rank 0",
            id="a call that one rank has left out",
        ),
        pytest.param(
            ["a2 b5 a2 b7", "a2 b6 a2 a2"],
            None,
            "collective 4 was all_reduce (train.py:2) on rank 1, and broadcast (train.py:7) on rank 0",
            id="before it the same call from a branch for each rank",
        ),
        pytest.param(["a2 b5 a2", "a2 b6 a2 b6"], None, "", id="the same calls"),
        pytest.param(["a2 b5", "a2 b6"], None, "", id="the last one in a branch for each rank"),
    ],
)
def test_the_rank_that_has_made_another_call_is_named(
    tmp_path: Path, calls: list[str], odd: int | None, line: str
) -> None:
    for rank, each in enumerate(calls):
        written(tmp_path, rank, each)
    ranks = range(len(calls))
    recorded = {rank: calls_of(tmp_path, rank) for rank in ranks}
    assert first_difference(recorded, dict.fromkeys(ranks, 1)) == (odd, line)


class Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("ran"),)  # type: ignore[return-value]


@pytest.mark.parametrize("content", [b"", b"\x80", pickle.dumps([1]), pickle.dumps({"entries": [{}]}), pickle.dumps(3)])
def test_what_is_no_recording_says_nothing(tmp_path: Path, content: bytes) -> None:
    assert calls_of(tmp_path, 0) == {}
    hang.flight_path(tmp_path, 0).write_bytes(content)
    assert calls_of(tmp_path, 0) == {}


def test_a_recording_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hang.flight_path(tmp_path, 0).write_bytes(pickle.dumps({"entries": [Runs()]}))
    assert calls_of(tmp_path, 0) == {}
    assert not Path("ran").exists()
