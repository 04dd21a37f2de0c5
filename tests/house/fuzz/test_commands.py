"""Every command with odd arguments, and in odd environments: documented exit codes, no traceback."""

import argparse
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from hypothesis import strategies as st

from tests.house.fuzz.harness import ACCEPTED, CLEAR, COUNTS, command, fuzz, seclude
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import RequestError
from toolkit.cli import disk
from toolkit.cli import main as cli
from toolkit.config import JobConfig, load_config
from toolkit.files import rundir
from toolkit.files.run_files import RunResult
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.formats.images import small
from toolkit.plugins.site import doctor, resume_check
from toolkit.run.rank import main as rank
from toolkit.run.submission import executors, inside_allocation
from toolkit.run.submission.handle import Run
from toolkit.slurm import placement

WORDS = [
    *("", " ", "x", "real", "20", "0", "-1", "1", "10", "99999999999999999999", "9" * 5000, "1.5", "nan", "inf"),
    *("1e400", "--", "-"),
    *("--json", "--follow", "--wait", "--rank", "--attempt", "--rank=0", "--rank=-1", "--attempt=1", "--keep=1"),
    *("--to", "--to=/x/y"),
    *("--nodes=0", "--nodes=1", "--nodes=-5", "--no-such", "--executor=x", "--executor=debug"),
    *("--executor=slurm", "-h", "--port=x"),
    *("a=b", "=", "=b", "a=", "a.b.c=1", "optim.lr=0.1", "optim.lr=x", "cluster.nodes=0", "cluster.nodes=9"),
    *("train.epochs=", "name=\u00e9"),
    *("configs/digits_ddp.yaml", "configs/none.yaml", "configs", "/dev/null", "/", "..", "~", "~nobody"),
    *("\u00e9", "\udcff", "a\nb", "\x1b[31m"),
    *("list", "verify", "diff", "export", "prune", "fetch", "digits", "mnist", "x" * 300, "x" * 5000),
    *("--checkpoint=best", "--steps=0"),
    *("--steps=1", "--at=99", "--how=x", "--then-ranks=0", "--then-ranks=-1", "--seed=-1", "--tolerance=nan"),
    *("--data", "root=/none"),
    *("--images=/none", "--output=x", "--output=/none/x.json", "--weights=x", "--format=x", "--as=dcp"),
    *("--with=none", "--with=real"),
]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rundir.RunDir:
    """Return a run in a folder of runs, with all starting, sending and fetching replaced."""
    seclude(monkeypatch, tmp_path)
    # an odd argument must not start a job, leave this process, or reach the network
    monkeypatch.setattr(executors, "send", lambda run, config, executor, owner, **more: Run(run, executor, "7"))
    monkeypatch.setattr(Run, "watch", lambda self: iter(()))
    # `toolkit serve` would serve for ever.
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: [each.close() for each in sockets])
    monkeypatch.setattr(Run, "wait", lambda self, timeout_s=None: {})
    monkeypatch.setattr(inside_allocation, "enter", lambda make_run: Allocation.slurm(os.environ))
    monkeypatch.setattr(rank, "load", lambda job, folder: SimpleNamespace(main=lambda config: None))
    monkeypatch.setattr(rank, "signals", _Nothing())
    monkeypatch.setattr(rank, "faulthandler", SimpleNamespace(enable=lambda: None))
    monkeypatch.setattr(rank, "hang", SimpleNamespace(install_stack_dump=lambda rank: None))
    monkeypatch.setattr(small, "fetch", lambda name, root: _refuse())
    monkeypatch.setattr(resume_check, "check", lambda *args: _refuse())
    monkeypatch.setattr(doctor, "ask_nodes", lambda *args, **kwargs: _refuse())
    monkeypatch.setattr(disk, "remove", lambda run: _refuse())
    monkeypatch.setattr(os, "execv", lambda *args: _refuse())
    run = rundir.create("real")
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(name="real")))
    run.write_result(RunResult.from_json({"state": "stopped", "why": "asked"}))
    return run


class _Nothing:
    def install(self) -> None: ...

    def ignore(self) -> None: ...


def _refuse() -> Any:
    raise RequestError("not in this test")


def commands() -> dict[str, list[str]]:
    """Return each command's options, as the parser has them."""
    found = {}
    for action in cli.build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found[name] = [option for each in sub._actions for option in each.option_strings if option != "-h"]
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_odd_arguments_end_in_a_documented_exit_code(world: rundir.RunDir, count: int) -> None:
    options = commands()
    words = {name: [*WORDS, world.id, "real", *own, *own] for name, own in options.items()}
    cases = st.one_of(*(st.tuples(st.just(name), st.lists(st.sampled_from(words[name]), max_size=5)) for name in words))

    def check(case: tuple[str, list[str]]) -> str:
        said = command([case[0], *case[1]])
        return ACCEPTED if said.code == 0 else CLEAR

    fuzz("arguments", cases, check, count)


VARIABLES = [
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_PROCID",),
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_STEP_NODELIST",),
    *("SLURM_NODEID", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_CPUS_PER_TASK", "SLURM_JOB_CPUS_PER_NODE"),
    *("SLURM_GPUS_ON_NODE",),
    *("SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME"),
    *("SLURM_LAUNCH_NODE_IPADDR",),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
    *("MASTER_PORT",),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("TOOLKIT_RUNS", "TOOLKIT_SITE", "TOOLKIT_ATTEMPT", "TOOLKIT_RUN_DIR", "TOOLKIT_OWNER"),
    *("TOOLKIT_SUPERVISED", "TOOLKIT_REPORTS", "TOOLKIT_CHAOS"),
    *("TOOLKIT_DATA", "TOOLKIT_LAUNCH_KEY", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "PMIX_RANK"),
    *("PMIX_NAMESPACE", "HOME", "COLUMNS"),
]
VALUES = [
    *("", " ", "0", "1", "2", "4", "-1", "1.5", "x", "9" * 30, "9" * 5000, "\u0661", "\u00b2", "0x1", "1 "),
    *("nan", "1(x2)", "2(x99999999999)"),
    *("n1", "n[1-4]", "n[1-", "n[4-1]", "n[1-99999999]", "a,b,,", "127.0.0.1", "::1", "300.1.1.1", "/"),
    *("/dev/null", "/proc/1/x", "\udcff"),
    *("none.yaml", "configs/digits_ddp.yaml", "x" * 5000, "a\nb", "[]", "{}", '[{"kind": 5}]', "~", "~nobody"),
    *("4294967294", "10,1(x3)"),
]


#: Environments of launchers, to be damaged.
LAUNCH = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}
STEP = {
    **LAUNCH,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
}


@pytest.fixture
def restored_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("restored_environment")
@pytest.mark.parametrize("count", COUNTS)
def test_odd_environments_are_refused_by_the_variable_or_mean_something(world: rundir.RunDir, count: int) -> None:
    odd = st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(VALUES), min_size=1, max_size=3)
    config = "configs/digits_ddp.yaml"
    argvs = [["placement", "--json"], ["placement"], ["status"], ["run", config], ["supervise", config], ["doctor"]]
    launches = st.sampled_from([{}, LAUNCH, STEP, TORCHRUN, {**LAUNCH, **TORCHRUN}])
    cases = st.tuples(launches, odd, st.sampled_from(argvs))
    plain = dict(os.environ)

    def check(case: tuple[dict[str, str], dict[str, str], list[str]]) -> str:
        os.environ.clear()
        os.environ.update({**plain, **case[0], **case[1]})
        codes = [command(case[2]).code]
        # also the readers that these commands may not reach
        for read in (lambda: placement.derive(os.environ, socket.gethostname()), lambda: load_config(None)):
            try:
                read()
            except RequestError as error:
                codes.append(error.exit_code)
        return CLEAR if any(codes) else ACCEPTED

    fuzz("environments", cases, check, count)
