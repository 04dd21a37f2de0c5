"""A traceback shows the user's own lines, whatever it is buried in."""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path

import pytest

from toolkit.base import tracebacks

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
    assert tracebacks.place(shape_error) == "models/net.py:10 in forward"


def test_a_traceback_without_the_users_lines_is_whole() -> None:
    frame = 'File "/v/lib/python3.11/site-packages/torch/x.py", line 3, in f'
    text = f"Traceback (most recent call last):\n  {frame}\n    f()\n    ^^^\nE\n"
    assert tracebacks.folded(text) == [line for line in text.splitlines() if "^" not in line]
    assert tracebacks.place(text) == "x.py:3 in f"


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
    assert tracebacks.place("") is None


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
    assert tracebacks.place(twice) == own[of_group]
    assert tracebacks.source(twice) == f"the line of {own[of_group].rpartition(' ')[2]}"
    assert tracebacks.place(f"{text}ValueError: no rank\n") == own[of_another_error]
