"""``trackers:`` of a run on this machine: ranks, and what sends, are killed, and the tracker is away."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.dist.test_local_runs import END_S, TOOLKIT, ranks, reached, start, the_run
from tests.waiting import PATIENCE, nobody_left, processes_with, wait_for
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

KILLS = 5
OVERRIDES = ["trackers=[lab:mine]", "train.epochs=120", "train.log_every=5", "checkpoint.every_steps=40"]
#: It refuses a step that is not new, as wandb does. It is away while a file is there, and fails within some batches.
LAB = """
import json
import os
from pathlib import Path

SERVER = Path(os.environ["LAB_SERVER"])


class Lab:
    lines_at_once = 7

    def __init__(self, run):
        self.copy, self.place = SERVER / f"{run.project}-{run.id}.jsonl", f"lab, {run.project}"

    def open(self, remote):
        self.refuse()
        is_there = self.copy.exists()
        self.copy.touch()
        return self.copy.name, is_there

    def refuse(self):
        from toolkit.base.errors import TrackerError
        if (SERVER / "away").exists():
            raise TrackerError("lab is away; nothing is lost")

    def tag(self, tag):
        return tag

    def received(self, since):
        return max((json.loads(line)["step"] for line in self.copy.read_text().splitlines()), default=-1)

    def send(self, lines):
        for line in lines:
            assert line.step > self.received(0), "a step was sent twice"
            with self.copy.open("a") as file:
                file.write(json.dumps({"step": line.step, **line.values}) + "\\n")
            if line.step in (400, 800, 1600):
                (SERVER / "away").touch()
                self.refuse()

    def clear(self):
        self.copy.unlink(missing_ok=True)
        return self.copy.name

    def close(self, state):
        (SERVER / "state").write_text(str(state))
"""


def install(folder: Path) -> None:
    """Put the plugin where ``PYTHONPATH`` finds it and its entry point."""
    info = folder / "lab_plugin-1.dist-info"
    info.mkdir(parents=True)
    (folder / "lab_plugin.py").write_text(LAB)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[toolkit.trackers]\nlab = lab_plugin:Lab\n")


def points(path: Path) -> dict[tuple[int, str], str]:
    """Return the points of a file, each value as text. There is one of each."""
    found: dict[tuple[int, str], str] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        step = line.pop("step")
        line.pop("wall_time", None)
        new = {(step, tag): repr(math.nan if value is None else float(value)) for tag, value in line.items()}
        assert not new.keys() & found.keys()
        found |= new
    return found


def test_kills_and_a_tracker_that_is_away_neither_lose_nor_double_a_point(env: dict[str, str], tmp_path: Path) -> None:
    install(tmp_path / "site")
    server = tmp_path / "server"
    server.mkdir()
    env |= {"LAB_SERVER": str(server), "PYTHONPATH": str(tmp_path / "site")}
    with start(env, *OVERRIDES, "retry.max_failures=10") as process:
        run = the_run(env)
        copy = server / f"mine-{run.id}.jsonl"
        for kill in range(1, KILLS + 1):
            # Past the checkpoint: these steps are repeated.
            at = reached(run, 140 * kill)
            os.kill(ranks(env)[kill % 2], signal.SIGKILL)
            wait_for(partial(_is_after, run, at.attempt or 0), END_S, "the next attempt")
        wait_for(lambda: copy.exists() and copy.stat().st_size, END_S, "points, while the run continues")
        assert run.result() is None
        os.kill(wait_for(partial(_sender, env), END_S, "what sends"), signal.SIGKILL)
        wait_for(partial(_comes_back_until_the_end, server, env), END_S, "the end of all processes")
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    attempts = run.attempts()
    assert len(attempts) == KILLS + 1
    assert any(first.step_end > second.step_start for first, second in itertools.pairwise(attempts))
    log = (run.logs / "supervisor.log").read_text()
    if rest := re.search(r"`toolkit (sync .*)` sends the rest", log):  # a busy machine: it has waited long enough
        while subprocess.run([*TOOLKIT, *rest[1].split()], env=env, check=False).returncode:
            (server / "away").unlink()  # it went away once more, and comes back
    assert points(copy) == points(lines.path_of(run))
    assert (server / "state").read_text() == "completed"
    assert "trackers: lab ended with -9; it is started again" in log


def _comes_back_until_the_end(server: Path, env: dict[str, str]) -> bool:
    (server / "away").unlink(missing_ok=True)
    return nobody_left(env)


def _sender(env: dict[str, str]) -> int | None:
    found = processes_with(f"TOOLKIT_RUNS={env['TOOLKIT_RUNS']}")
    return next(
        (pid for pid, command in found.items() if "toolkit upload" in command and "die_with" not in command), None
    )


def _is_after(run: RunDir, attempt: int) -> bool:
    return (run.status().attempt or 0) > attempt
