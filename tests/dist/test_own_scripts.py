"""Loops as PyTorch's own pages show them stop and come back.

At most ten changed lines bring them to toolkit.start().
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dist.script_ranks import ScriptServer

SCRIPTS = Path(__file__).parent / "library_scripts"
LOOPS = ("ddp", "fsdp2", "gan")
MODULES = ["torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard", "toolkit.train.own_loop"]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    started = ScriptServer(MODULES)
    yield started
    started.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_is_stopped_and_killed_ends_bit_for_bit_as_an_undisturbed_one(
    loop: str, server: ScriptServer, tmp_path: Path
) -> None:
    def attempt(run: str, *strikes: tuple[int, int, str], kind: str = "after") -> list[int]:
        told = [{"rank": rank, "step": step, "signal": signal, "at": "step"} for rank, step, signal in strikes]
        return server.attempt(SCRIPTS / f"{loop}_{kind}.py", tmp_path / run, ["checkpoint.every_steps=20"], told)

    assert attempt("whole") == [0, 0]
    assert attempt("again", (1, 7, "SIGTERM")) == [75, 75]
    assert -9 in attempt("again", (1, 47, "SIGKILL"))
    assert attempt("again", (0, 64, "SIGUSR1")) == [75, 75]  # at the end of an epoch of 16 steps
    assert attempt("again") == [0, 0]
    ends = [torch.load(tmp_path / run / "cwd/end.pt", weights_only=True) for run in ("whole", "again")]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])] == []
