"""Which of torch's flight recorders is dumped. Each backend has its own, and versions of torch differ."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit import hang
from toolkit.hang import debug_environment


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
    hang._dump_flight_recorder(tmp_path / "flight-0")
    assert pickle.loads((tmp_path / "flight-0").read_bytes())["entries"] == [expected]


def test_files_that_waited_for_stacks_in_vain_are_removed(tmp_path: Path) -> None:
    for name, text in {"stack-0.txt": "", "stack-1.txt": "told", "stack-1-worker-0.txt": "", "rank-0.log": ""}.items():
        (tmp_path / name).write_text(text)
    hang.remove_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.log", "stack-1.txt"]


def test_a_rank_without_a_supervisor_ignores_the_signal() -> None:
    code = "import os\nfrom toolkit import hang\nhang.answer(0, {})\nos.kill(os.getpid(), hang.ASK)\n"
    code += "print('on')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "on\n"


def test_what_the_user_has_set_for_nccl_stays(tmp_path: Path) -> None:
    assert "NCCL_DEBUG_FILE" not in debug_environment(tmp_path, {})
    ours = debug_environment(tmp_path, {"NCCL_DEBUG": "INFO", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"})
    assert ours == {"NCCL_DEBUG_FILE": f"{tmp_path}/nccl-%h-%p.log", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert debug_environment(tmp_path, {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/mine"}).keys() == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_FR_DUMP_TEMP_FILE",
    }
