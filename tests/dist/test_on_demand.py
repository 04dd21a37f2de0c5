"""Requests to running ranks, on this machine: their stacks, a profile, a stop to continue with other values."""

import gzip
import json
import math
import re
import stat
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_local_hangs import hangs_itself
from tests.dist.test_local_hangs import start as start_hanging
from tests.dist.test_local_runs import END_S, TOOLKIT, reached, start, the_run
from tests.waiting import PATIENCE, wait_for
from toolkit.checkpoint.folder import newest_step
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]


def ask(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOOLKIT, *words], env=env, capture_output=True, text=True, check=False)


def stacks_of(env: dict[str, str], run: RunDir) -> dict[tuple[int, ...], dict[str, Any]]:
    """The groups of `toolkit stacks` by their ranks."""
    done = ask(env, "stacks", run.id, "--json")
    assert done.returncode == 0, done.stderr
    return {tuple(group["ranks"]): group for group in json.loads(done.stdout)["groups"]}


def test_stacks_show_what_each_rank_of_a_deadlock_does_and_disturb_none(env: dict[str, str], tmp_path: Path) -> None:
    """The supervisor finds the same hang later, by stacks that are no older than it."""
    with start_hanging(env, tmp_path, "collective") as process:
        run = the_run(env)
        rank = hangs_itself(env, run)

        def all_wait() -> bool:
            groups = stacks_of(env, run)
            others = tuple(other for other in range(3) if other != rank)
            return "in all_reduce" in groups.get(others, {}).get("doing", "")

        wait_for(all_wait, END_S, "ranks that wait in one all_reduce")
        hung = stacks_of(env, run)[rank,]
        assert re.fullmatch(r"in a step \(hangs\.py:\d+\)", hung["doing"])
        assert hung["stack"][0].endswith("in hang_for_ever")
        text = ask(env, "stacks", run.id).stdout
        assert f"rank {rank}: in a step" in text
        assert "2 ranks: " in text
        assert ask(env, "stacks", run.id, "--rank", "7").returncode == 2
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    first, _ = run.attempts()
    assert (first.cause, first.first_failure and first.first_failure.rank) == ("hang", rank)
    # A run that has ended has no process to ask.
    done = ask(env, "stacks", run.id)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has ended (completed)" in done.stderr


#: They take some ten seconds. Nothing is saved until a user asks for it.
STEPS = 3000
LONG = [
    *("train.epochs=1000", f"train.max_steps={STEPS}", "train.eval_every=2000"),
    *("optim.lr=0.1", "optim.warmup_steps=20", "checkpoint.every_steps=1000000"),
]


def rates(run: RunDir) -> dict[int, float]:
    """The learning rate that was logged after each step."""
    lines = map(json.loads, (run.tensorboard / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/lr"] for line in lines if "train/lr" in line}


def test_after_a_stop_a_resume_goes_on_with_other_values(env: dict[str, str]) -> None:
    with start(env, *LONG, "cluster.tasks_per_node=3") as process:
        run = the_run(env)
        reached(run, 100)
        assert ask(env, "stop", run.id).returncode == 0
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert (run.attempts()[-1].cause, run.status().state) == ("stopped", "stopped"), out
    stopped = newest_step(run.checkpoints)
    assert stopped is not None
    done = ask(env, "resume", run.id, "--wait", "optim.lr=0.02", "train.log_every=7")
    assert done.returncode == 0, done.stderr
    assert "the learning rate" in done.stderr
    assert run.attempts()[-1].step_start == stopped
    # The rate follows the schedule of the config from its peak, which is a function of the step.
    logged = rates(run)
    assert {step % 20 for step in logged if step <= stopped} == {0}
    assert all(step % 7 == 0 for step in logged if stopped < step < STEPS)
    for step, rate in logged.items():
        fallen = 0.5 * (1 + math.cos(math.pi * (step - 1 - 20) / (STEPS - 20)))
        assert step <= 20 or rate == pytest.approx((0.1 if step <= stopped else 0.02) * fallen, rel=1e-5)


def test_a_profile_has_the_operators_of_its_steps_and_what_they_allocate(env: dict[str, str]) -> None:
    """Of rank 1. Two requests at one time are answered both: one by a profile, one by a refusal or a later profile."""
    with start(env, *LONG, "train.max_steps=100000", "data.workers=0") as process:
        run = the_run(env)
        reached(run, 50)
        assert ask(env, "profile", run.id, "--rank", "2").stderr.endswith("has no rank 2: its ranks are 0 to 1\n")
        assert ask(env, "profile", run.id, "--steps", "0").returncode == 2
        done = ask(env, "profile", run.id, "--rank", "1", "--steps", "4", "--memory")
        assert done.returncode == 0, done.stderr
        trace, table = (Path(line.split()[0]) for line in done.stdout.splitlines()[1:])
        twice = [subprocess.Popen([*TOOLKIT, "profile", run.id], env=env, stderr=subprocess.PIPE) for _ in range(2)]
        assert {each.wait(PATIENCE * END_S) for each in twice} <= {0, 2}
        assert 0 in {each.returncode for each in twice}
        for each in twice:
            each.communicate()
        ask(env, "cancel", run.id)
        process.communicate(timeout=PATIENCE * END_S)
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = sorted(
        (each["ts"], each["ts"] + each["dur"], each["name"])
        for each in events
        if each.get("ph") == "X" and re.fullmatch(r"step \d+", each["name"]) and each["cat"] == "user_annotation"
    )
    first = int(re.search(r"step-(\d+)", trace.name)[1])
    assert [name for _, _, name in steps] == [f"step {first + n}" for n in range(4)]
    # Each step has the same operators: those of a forward and a backward pass, and of one update.
    operators = [each for each in events if each.get("cat") == "cpu_op"]
    by_step = [Counter(each["name"] for each in operators if begin <= each["ts"] < end) for begin, end, _ in steps]
    assert sum(map(sum, (counts.values() for counts in by_step))) == len(operators)
    for counts in by_step:
        assert counts["aten::addmm"] == by_step[0]["aten::addmm"] > 0
        assert counts["aten::_fused_sgd_"] == 1
    # Memory: what was allocated and freed, and by which operators.
    allocated = [each["args"]["Bytes"] for each in events if each.get("name") == "[memory]"]
    assert max(allocated) > 0 > min(allocated)
    assert re.search(r"aten::addmm +.*\d+\.\d+ [KM]B", table.read_text())
