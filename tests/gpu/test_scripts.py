"""Scripts on a GPU that are stopped and killed end as undisturbed ones.

They agree bit for bit, dropout's random numbers included.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dist.script_ranks import PRELOAD, ScriptServer
from tests.dist.test_integrations import END, EVERY, SCRIPTS, weights
from tests.dist.test_own_scripts import MODULES
from tests.gpu import NO_GPU

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]

BATCH = ("(inputs), targets", "(inputs.cuda()), targets.cuda()")
#: What makes of a script for the CPU one for a GPU.
MOVES = {
    "accelerate": [("cpu=True", "")],
    "lightning": [('accelerator="cpu", devices=3', 'accelerator="gpu", devices=1')],
    "transformers": [("use_cpu=True", "use_cpu=False")],
    "ddp": [("nn.Linear(32, 2))", "nn.Linear(32, 2)).cuda()"), BATCH],
    "fsdp2": [('mesh("cpu"', 'mesh("cuda"'), BATCH],
}


@pytest.fixture
def server(name: str) -> Iterator[ScriptServer]:
    if name in PRELOAD:
        pytest.importorskip(name, reason=f"{name} is not installed")
    modules = [module for module in PRELOAD.get(name, MODULES) if importlib.util.find_spec(module.partition(".")[0])]
    started = ScriptServer(modules)
    yield started
    started.close()


@pytest.mark.parametrize("name", MOVES)
def test_a_stopped_and_killed_script_ends_bit_for_bit_as_an_undisturbed_one(
    name: str, server: ScriptServer, tmp_path: Path
) -> None:
    text = (SCRIPTS / f"{name}_after.py").read_text()
    for old, new in MOVES[name]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = tmp_path / f"{name}.py"
    script.write_text(text)

    def attempt(run: str, *strikes: tuple[int, str]) -> list[int]:
        told = [{"rank": 0, "step": step, "signal": signal, "at": "step"} for step, signal in strikes]
        return server.attempt(script, tmp_path / run, EVERY, told, ranks=1)

    logs = lambda: "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))  # noqa: E731
    assert attempt("whole") == [0], logs()
    assert attempt("again", (7, "SIGTERM")) == [75], logs()
    assert attempt("again", (47, "SIGKILL")) == [-9], logs()
    # Only a script that began anew would come to this step.
    assert attempt("again", (20, "SIGKILL")) == [0], logs()
    one, other = (weights(tmp_path / run / "cwd" / END.get(name, "end.pt")) for run in ("whole", "again"))
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
