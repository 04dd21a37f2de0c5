"""Which of torch's flight recorders is dumped. Each backend has its own, and versions of torch differ."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.hang import stacks


def dump(*entries: str) -> bytes:
    return pickle.dumps({"version": "2.10", "entries": list(entries)})


def new(filled: Mapping[str, bytes]) -> Callable[..., bytes]:
    """Return the dump function of torch 2.15, which has a recorder for each backend."""
    return lambda backend="gloo": filled.get(backend, dump())


@pytest.mark.parametrize(
    ("recorders", "expected"),
    [
        ({"_dump_nccl_trace": lambda: dump("old")}, "old"),
        ({"_dump_nccl_trace": dump, "_dump_fr_trace": new({"nccl2": dump("nccl2")})}, "nccl2"),
        ({"_dump_nccl_trace": lambda: dump("legacy"), "_dump_fr_trace": new({})}, "legacy"),
        ({"_dump_nccl_trace": dump, "_dump_fr_trace": new({"gloo": dump("gloo")})}, "gloo"),
        ({"_dump_fr_trace": lambda: dump("2.11")}, "2.11"),
    ],
    ids=["nccl on 2.11", "nccl on 2.15", "nccl-legacy", "gloo", "gloo on 2.11"],
)
def test_the_recorder_that_has_seen_collectives_is_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorders: Mapping[str, Callable[..., bytes]], expected: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**recorders))
    stacks._dump_flight_recorder(tmp_path / "flight-0")
    assert pickle.loads((tmp_path / "flight-0").read_bytes())["entries"] == [expected]
