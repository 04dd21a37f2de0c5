"""A traceback shows the user's own lines, whatever it is buried in."""

import pickle
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit import hang
from toolkit.base import logs, tracebacks
from toolkit.hang import debug_environment

#: A model whose layers do not fit; its file is in a run's copy of the sources.
MODEL = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(8, 4)), nn.Linear(5, 2))

    def forward(self, x):
        return self.layers(x)

def train():
    Net()(torch.zeros(3, 8))

train()
"""


@pytest.fixture
def shape_error(tmp_path: Path) -> str:
    """Return torch's own traceback of a shape error, as Python writes it."""
    path = tmp_path / "runs/net/20261127-120000-0123abcd/.code/now/models/net.py"
    path.parent.mkdir(parents=True)
    path.write_text(MODEL)
    with pytest.raises(RuntimeError) as caught:
        runpy.run_path(str(path))
    # Without the frames of this test, which are a user's, too.
    last = caught.value.__traceback__
    while last is not None and last.tb_frame.f_code.co_filename != str(path):
        last = last.tb_next
    return "".join(traceback.format_exception(caught.value.with_traceback(last)))


def test_of_a_shape_error_the_users_lines_are_shown_and_torchs_are_one(shape_error: str) -> None:
    assert len(shape_error.splitlines()) > 25
    lines = tracebacks.folded(shape_error)
    text = "\n".join(lines)
    assert lines[0] == "Traceback (most recent call last):"
    for line in ("    train()", "    Net()(torch.zeros(3, 8))", "    return self.layers(x)"):
        assert line in lines
    assert '  File "models/net.py", line 10, in forward' in lines
    assert lines[-1].startswith("RuntimeError: ")
    assert "mat1 and mat2 shapes cannot be multiplied" in lines[-1]
    assert not [line for line in lines if line.strip() and not line.strip(" ^~")]
    assert sum(" of torch, to " in line for line in lines) == 2
    assert "of torch, to linear.py:" in lines[-2]
    assert "site-packages" not in text
    assert len(lines) == 10
    assert tracebacks.origin_frame(shape_error) == "models/net.py:10 in forward"


def test_a_traceback_without_the_users_lines_is_whole() -> None:
    frame = 'File "/v/lib/python3.11/site-packages/torch/x.py", line 3, in f'
    text = f"Traceback (most recent call last):\n  {frame}\n    f()\n    ^^^\nE\n"
    assert tracebacks.folded(text) == [line for line in text.splitlines() if "^" not in line]
    assert tracebacks.origin_frame(text) == "x.py:3 in f"


def test_chains_groups_repeats_and_other_text_are_kept() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/p/a.py", line 1, in f\n    f()\n    ~^^\n  [Previous line repeated 990 more times]\n'
        "KeyError: 'x'\n\nThe above exception was the direct cause of the following exception:\n\n"
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/p/b.py", line 2, in g\n  | ValueError: two\n    lines\n'
    )
    lines = tracebacks.folded(text)
    assert lines == [line for line in text.rstrip().splitlines() if "~^^" not in line]
    assert tracebacks.folded("no traceback") == ["no traceback"]
    assert tracebacks.folded("") == [""]
    assert tracebacks.origin_frame("") is None


TIMM = "site-packages/timm/dist.py:8 init_device"


@pytest.mark.parametrize(
    ("calls", "of_group", "of_another_error"),
    [
        ("train.py:9 <module>, train.py:5 main, timm/dist.py:3 init_device, timm/dist.py:8 init_device_so", 1, 3),
        ("run.py:2 <module>, pack/train.py:5 train, pack/env.py:3 ddp_setup", 1, 2),
        ("train.py:9 <module>, train.py:5 setup", 0, 1),
        ("train.py:9 <module>, train.py:5 __init__", 1, 1),
        ("train.py:9 <module>", 0, 0),
        ("env.py:3 setup", 0, 0),
        (f"train.py:9 <module>, train.py:5 main, lib/python3.11/{TIMM}", 1, 1),
    ],
)
def test_of_a_second_process_group_the_scripts_own_call_is_named(
    calls: str, of_group: int, of_another_error: int
) -> None:
    own = [call.replace(" ", " in ") for call in calls.split(", ")]
    text = "Traceback (most recent call last):\n"
    for call in [*calls.split(", "), "lib/python3.11/site-packages/torch/c10d.py:17 init_process_group"]:
        file, line, function = call.replace(" ", ":").split(":")
        text += f'  File "{file}", line {line}, in {function}\n    the line of {function}\n'
    twice = f"{text}ValueError: trying to initialize the default process group twice!\n"
    assert tracebacks.origin_frame(twice) == own[of_group]
    assert tracebacks.source(twice) == f"the line of {own[of_group].rpartition(' ')[2]}"
    assert tracebacks.origin_frame(f"{text}ValueError: no rank\n") == own[of_another_error]


CRASHES = """
import ctypes, os, sys, threading

def crash():
    getattr(os, sys.argv[1])() if sys.argv[1] == "abort" else ctypes.string_at(0)

if sys.argv[2:]:
    threading.Thread(target=crash).start()
    threading.Event().wait()
crash()
"""


@pytest.mark.parametrize("how", [["abort"], ["read"], ["read", "in a thread"]])
def test_a_deadly_signal_is_placed_by_the_stack_that_faulthandler_prints(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "crash.py").write_text(CRASHES)
    command = [sys.executable, "-X", "faulthandler", "crash.py", *how]
    log = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr
    assert tracebacks.signal_frame(log) == "crash.py:5 in crash"
    assert tracebacks.signal_frame("killed\n") is None


def test_a_crash_in_a_thread_of_compiled_code_is_placed_by_the_main_thread() -> None:
    threads = ('"/usr/lib/python3.11/threading.py", line 331 in wait', '"t.py", line 9 in all_reduce')
    stacks = "\n\n".join(f"Thread 0x7f (most recent call first):\n  File {frame}" for frame in threads)
    log = f"Fatal Python error: Aborted\n\n{stacks}\n\nExtension modules: numpy (total: 1)\n"
    assert tracebacks.signal_frame(log) == "t.py:9 in all_reduce"


def test_a_warning_that_others_cause_comes_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    warnings = logs.RateLimitedWarnings(logs.get("toolkit.somebody"))
    for _ in range(1000):
        warnings.warn("garbage: %d bytes", 7)
    now += 61.0
    warnings.warn("garbage: %d bytes", 8)
    assert caplog.messages == ["garbage: 7 bytes", "garbage: 8 bytes (999 more since the last such line)"]


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
    code = "import os\nfrom toolkit import hang\nhang.install_stack_dump(0, {})\nos.kill(os.getpid(), hang.ASK)\n"
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
