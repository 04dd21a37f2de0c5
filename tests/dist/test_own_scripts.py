"""Loops as PyTorch's own pages show them stop and come back.

At most ten changed lines bring them to toolkit.start().
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dist.script_ranks import ScriptServer
from toolkit.base import torch_version

SCRIPTS = Path(__file__).parent / "library_scripts"
LOOPS = ("ddp", "fsdp2", "gan")
MODULES = ["torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard", "toolkit.train.user_loop"]

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
    if loop == "fsdp2":
        torch_version.refuse_older([torch_version.SHARDS_ON_CPUS])

    def attempt(run: str, *strikes: tuple[int, int, str], kind: str = "after") -> list[int]:
        told = [{"rank": rank, "step": step, "signal": signal, "at": "step"} for rank, step, signal in strikes]
        return server.attempt(SCRIPTS / f"{loop}_{kind}.py", tmp_path / run, ["checkpoint.every_steps=20"], told, 3)

    assert attempt("whole") == [0] * 3
    assert attempt("again", (1, 7, "SIGTERM")) == [75] * 3
    assert -9 in attempt("again", (1, 47, "SIGKILL"))
    assert attempt("again", (0, 64, "SIGUSR1")) == [75] * 3  # at the end of an epoch of 16 steps
    assert attempt("again") == [0] * 3
    ends = [torch.load(tmp_path / run / "cwd/end.pt", weights_only=True) for run in ("whole", "again")]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])] == []


#: Each data worker has a helper of its own. At step 10 all processes below the ranks get all stop signals.
WITH_CHILDREN = """
import os, pathlib, signal, subprocess
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import toolkit

class Helped(Dataset):
    helper = None
    def __len__(self):
        return 64
    def __getitem__(self, index):
        self.helper = self.helper or subprocess.Popen("while read line; do echo $line; done", shell=True, text=True,
                                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        print(index, file=self.helper.stdin, flush=True)
        return torch.full((4,), float(self.helper.stdout.readline()))

def below(pid):
    for children in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield int(child)
            yield from below(child)

with toolkit.start() as run:
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = Helped()
    loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=2)
    run.resumable(model=model, optimizer=optimizer)
    for _ in run.epochs(6):
        for x in run.steps(loader):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            if run.step == 10 and os.environ["TOOLKIT_ATTEMPT"] == "1":
                told = list(below(os.getpid()))
                assert len(told) >= 4, told
                for pid in [*told, *[os.getpid()] * (run.rank == 1)]:
                    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                        os.kill(pid, number)
"""


def test_a_stop_that_reaches_all_children_of_the_ranks_is_saved(server: ScriptServer, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITH_CHILDREN)
    assert server.attempt(tmp_path / "train.py", tmp_path / "run") == [75, 75]
    assert server.attempt(tmp_path / "train.py", tmp_path / "run") == [0, 0]
    resumed = (tmp_path / "run.2.0.log").read_text()
    stopped = (tmp_path / "run.1.0.log").read_text()
    assert "; committed" in stopped
    step = int(stopped.partition("stopped at step ")[2].split()[0])
    assert f"resuming from {tmp_path}/run/checkpoints/step-{step:08}" in resumed
