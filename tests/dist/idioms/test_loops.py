"""Loops with the idioms of public training scripts, under toolkit.start(), are preempted and killed at random steps.

Each ends bit for bit as undisturbed, on three ranks or four: a sum of two has the same bits in any order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dist.script_ranks import ScriptServer

LOOPS = Path(__file__).parent / "loops"
WORDS = {
    "arguments": ["--epochs", "6", "--lr", "0.5", "--no-dropout"],
    "overrides": ["optim.name=AdamW", "optim.lr=0.01", "epochs=6"],
}
MODULES = ["torch._dynamo", "torch.utils.tensorboard", "toolkit.train.user_loop"]
NAMES = sorted(path.stem for path in LOOPS.glob("*.py") if path.stem != "parts")

pytestmark = [pytest.mark.dist, pytest.mark.sample(2)]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    started = ScriptServer(MODULES)
    yield started
    started.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_stopped_and_killed_at_random_steps_ends_as_undisturbed(
    name: str, server: ScriptServer, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    ranks = dice.choice((3, 4))
    # A stop comes some steps after its signal, and after those that accumulate. 36 steps are the fewest.
    first, second, third = dice.randrange(1, 7), dice.randrange(14, 19), dice.randrange(20, 26)

    def attempt(run: str, step: int = 0, signal: str = "") -> list[int]:
        strikes = [{"rank": dice.randrange(ranks), "step": step, "signal": signal, "at": "step"}] if signal else []
        overrides = [f"checkpoint.every_steps={dice.randrange(2, 9)}", "train.log_every=5"]
        return server.attempt(LOOPS / f"{name}.py", tmp_path / run, overrides, strikes, ranks, WORDS.get(name, []))

    def log() -> str:
        return "\n".join([f"seed {seed}", *(path.read_text()[-2000:] for path in sorted(tmp_path.glob("*.log")))])

    assert attempt("whole") == [0] * ranks, log()
    assert attempt("again", first, "SIGTERM") == [75] * ranks, log()
    assert -9 in attempt("again", second, "SIGKILL"), log()
    assert attempt("again", third, "SIGUSR1") == [75] * ranks, log()
    assert attempt("again") == [0] * ranks, log()
    ends = [torch.load(tmp_path / run / "cwd/end.pt", weights_only=True) for run in ("whole", "again")]
    assert ends[0].keys() == ends[1].keys()
    assert [key for key, value in ends[0].items() if not torch.equal(value, ends[1][key])] == [], log()
