"""A user's own job by its path, with own keys, from submit to TensorBoard.

It runs two ranks on this machine.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from toolkit.files import rundir
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

PARAMS = """
from dataclasses import dataclass, field

import toolkit
from nets import net
from toolkit.config import filled
from toolkit.ranks.session import open_session

@dataclass
class Block:
    depth: int = 1

@dataclass
class Params:
    width: int
    scales: tuple[float, ...] = (1.0, 2.0)
    block: Block = field(default_factory=Block)
"""
MAIN = """
def main(config):
    params = filled(Params, config.params)
    with open_session(config.dist) as session:
        model = net(params.width, params.block.depth)
        size = sum(p.numel() for p in model.parameters())
        session.finish({"step": 1, "epoch": 1, "samples": 1, "metrics": {"size": size, "scale": params.scales[-1]}})
"""
LOOP = """
with toolkit.start() as run:
    params = run.params(Params)
    model = net(params.width, params.block.depth)
    run.resumable(model=model)
    for _ in run.steps([0], total=3):
        run.log(size=sum(p.numel() for p in model.parameters()), scale=params.scales[-1])
"""
NETS = """
from torch import nn

def net(width, depth):
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])
"""


def ended(folder: Path, job: str) -> RunDir:
    (folder / "tasks").mkdir()
    (folder / "tasks/nets.py").write_text(NETS)
    (folder / "tasks/mine.py").write_text(PARAMS + job)
    config = "job: ./tasks/mine.py\ncluster: {tasks_per_node: 2}\nparams: {width: 4, block: {depth: 3}}\n"
    (folder / "mine.yaml").write_text(config + "train: {log_every: 1}\n" * (job == LOOP))
    argv = [sys.executable, "-P", "-m", "toolkit", "submit", "mine.yaml", "--executor", "local", "--wait"]
    env = {**os.environ, "TOOLKIT_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*argv, "params.scales=[1, 5]"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = rundir.all_runs(folder / "runs")
    found = yaml.safe_load(run.config.read_text())
    assert (found["job"], found["params"]["scales"]) == ("tasks/mine.py", [1.0, 5.0])
    return run


def test_a_job_by_path_has_its_params_and_its_neighbours_on_each_rank(tmp_path: Path) -> None:
    assert ended(tmp_path, MAIN).result().metrics == {"size": 48, "scale": 5.0}


def test_a_loop_has_its_params_and_shows_them_in_tensorboard(tmp_path: Path) -> None:
    run = ended(tmp_path, LOOP)
    events = EventAccumulator(str(run.tensorboard), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()
    contents = events.PluginTagToContent("hparams")
    content = contents["_hparams_/session_start_info"]
    shown = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert shown["params.width"].number_value == 4
    assert shown["params.block.depth"].number_value == 3
    assert shown["params.scales"].string_value == "[1.0, 5.0]"
    end = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/session_end_info"]).session_end_info
    assert api_pb2.Status.Name(end.status) == "STATUS_SUCCESS"
    assert {event.value for event in events.Scalars("train/size")} == {48}
