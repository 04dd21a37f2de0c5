"""A loop with DistributedDataParallel is killed, and ends on three and four ranks with the same bits.

On two ranks a sum has the same bits in any bucket, so two ranks would show nothing.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dist.script_ranks import ScriptServer

LOOP = Path(__file__).parent / "idioms/buckets.py"
WAYS = [
    "plain",
    "static",
    "unused",
    "views",
    "hook",
    "built_in",
    "bare",
    "wrapped_late",
    "compiled",
    "no_sync",
    "later",
]

pytestmark = [pytest.mark.dist, pytest.mark.sample(3)]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    started = ScriptServer(["torch._dynamo", "toolkit.train.user_loop"])
    yield started
    started.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_loop_sums_gradients_in_the_same_buckets(way: str, server: ScriptServer, tmp_path: Path) -> None:
    ranks = random.choice((3, 4))
    ended = [0] * ranks

    def attempt(run: str, *kills: int) -> list[int]:
        strikes = [{"rank": 1, "step": step, "signal": "SIGKILL", "at": "step"} for step in kills]
        return server.attempt(LOOP, tmp_path / run, ["checkpoint.every_steps=1"], strikes, ranks, [way])

    def log() -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(tmp_path.glob("*.log")))

    assert attempt("whole") == ended, log()
    for step in (2, 9):  # the first checkpoint is one of the first step, whose buckets are those of a new DDP
        assert -9 in attempt("again", step), log()
    assert attempt("again") == ended, log()
    whole, again = (torch.load(tmp_path / run / "cwd/end.pt", weights_only=True) for run in ("whole", "again"))
    assert [name for name, value in whole.items() if not torch.equal(value, again[name])] == []
