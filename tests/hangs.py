"""A job that hangs in its first attempt, in each way of training jobs."""

from pathlib import Path

#: The reference job, with its data sample by sample: a loader (or its worker) reads them one after the other. A rank
#: that is about to hang makes a file first, so that a test knows which rank the report must name.
JOB = """
import os, threading, time
from pathlib import Path
import numpy as np
from jobs.classify import Classify
from toolkit.base import process_limits

KIND = "{kind}"
FIRST = os.environ["TOOLKIT_ATTEMPT"] == "1"
SAMPLE, STEP, PAUSES = 700, 30, 8


def hang_for_ever():
    Path(os.environ["TOOLKIT_RUN_DIR"], "hung-" + os.environ["RANK"]).touch()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class OneByOne:
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if KIND == "sample" and FIRST and index == SAMPLE:
            hang_for_ever()
        inputs, targets = self.data.batch(np.array([index]))
        return inputs[0], targets[0]


class Hanging(Classify):
    calls = 0
    eval_batch_size = 40 if KIND == "slow" else 256

    def setup(self):
        super().setup()
        if KIND == "slow":
            process_limits.override(written_piece_bytes=8192)
            os.fdatasync = lambda fd: time.sleep({pause_s})

    def train_set(self):
        return OneByOne(super().train_set())

    def loss(self, model, batch):
        self.calls += 1
        if KIND == "collective" and FIRST and os.environ["RANK"] == "1" and self.calls == STEP:
            hang_for_ever()
        return super().loss(model, batch)

    def evaluate(self, model, batch):
        if KIND == "slow":
            time.sleep({pause_s})
        return super().evaluate(model, batch)
"""

CONFIG = """
job: jobs.hangs
cluster: {nodes: 1, tasks_per_node: 3, time_min: 10}
data: {name: digits, global_batch_size: 64}
optim: {lr: 0.05}
train: {max_steps: 60, eval_every: 60, log_every: 10}
checkpoint: {every_steps: 20}
"""


def write_project(folder: Path, kind: str, pause_s: float = 0.0) -> None:
    """Write a project with the config ``hangs.yaml`` and a job that hangs or is slow.

    ``kind`` is the way in which it hangs: ``none``, ``sample`` (in the loader, or in its worker if there is one) or
    ``collective``. A ``slow`` job pauses for ``pause_s`` in each evaluation and save.
    """
    source = Path(__file__).parents[1] / "jobs"
    plain = {name: (source / f"{name}.py").read_text() for name in ("classify", "models")}
    (folder / "jobs").mkdir(parents=True)
    for name, text in {**plain, "__init__": "", "hangs": JOB.format(kind=kind, pause_s=pause_s)}.items():
        (folder / f"jobs/{name}.py").write_text(text)
    (folder / "hangs.yaml").write_text(CONFIG)


def hung_rank(run_dir: Path) -> int:
    """The rank that has said that it is about to hang."""
    (path,) = run_dir.glob("hung-*")
    return int(path.name.removeprefix("hung-"))
