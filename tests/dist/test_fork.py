"""A rank that is forked finds what a fresh interpreter finds that has imported the same modules."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.waiting import PATIENCE
from toolkit import rundir
from toolkit.launch.agent_launcher import MODULE, AgentLauncher
from toolkit.launch.agent_starters import LocalAgent
from toolkit.launch.agents import Agents
from toolkit.launch.allocation import Allocation
from toolkit.launch.steps import RankEnded, StepEnded
from toolkit.launch.store import Report

pytestmark = pytest.mark.dist
TIMEOUT_S = 60 * PATIENCE

#: Says all that a program can see of itself; what must differ comes apart.
PROBE = Path(__file__).with_name("fork_probe.py")


class Site:
    def __init__(self, folder: Path) -> None:
        (folder / "probe.py").write_text(PROBE.read_text())
        self.run = rundir.create("fork", folder / "runs")
        self.folder, self.events, self.attempt = folder, SimpleQueue[Any](), 0
        self.allocation = Allocation(("here",), (2,), 1)
        self.starter = LocalAgent(self.run)
        self.agents = Agents(self.run, self.allocation, self.starter)
        self.launcher = AgentLauncher(self.run, self.allocation, self.agents)

    def run_module(self, command: list[str], **changed: str) -> list[Any]:
        """What happens to two ranks that become ``command``."""
        self.attempt += 1
        path = f"{self.folder}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        environ = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", **changed}
        store = self.launcher.start_store(self.attempt, 2, "127.0.0.1", environ, self.events)
        self.launcher.start(self.attempt, self.allocation, command, environ, self.events, store)
        happened: list[Any] = []
        while not happened or not isinstance(happened[-1], StepEnded):
            event = self.events.get(timeout=TIMEOUT_S)
            happened += [] if isinstance(event, Report) else [event]
        store.close(TIMEOUT_S)
        return happened

    def log(self, rank: int) -> str:
        return self.run.rank_log(self.attempt, rank).read_text()


@pytest.fixture
def site(tmp_path: Path) -> Any:
    site = Site(tmp_path)
    yield site
    site.agents.close()


def test_a_fork_is_as_good_as_a_fresh_interpreter(site: Site) -> None:
    fresh, forked = site.folder / "fresh", site.folder / "forked"
    for folder, starter in ((fresh, ["env", *MODULE]), (forked, [*MODULE])):
        folder.mkdir()
        # the second attempt has another environment than its agent
        happened = site.run_module([*starter, "probe", str(folder), "3"], WORD=folder.name, MASTER_PORT="1")
        assert [event.exit_code for event in happened] == [3, 3, 3], site.log(0)
    assert "forked from a process" in (site.run.logs / "agent.log").read_text()
    values = {
        folder.name: [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        for folder in (fresh, forked)
    }
    for rank in range(2):
        (wanted, _, fresh_modules), (got, _, modules) = values["fresh"][rank], values["forked"][rank]
        text = json.dumps(wanted).replace(str(fresh), str(forked)).replace('"WORD": "fresh"', '"WORD": "forked"')
        wanted = json.loads(text.replace("attempt-001", "attempt-002"))
        assert {name: value for name, value in got.items() if value != wanted[name]} == {}
        assert set(fresh_modules) <= set(modules)
    for name in values["fresh"][0][1]:
        seen = [differ[name] for folder in values.values() for _, differ, _ in folder]
        assert len(set(seen)) == 4, name


@pytest.mark.parametrize(
    ("body", "codes", "words"),
    [
        ("print('no newline', end='')", [0], "no newline"),
        ("raise ValueError('told')", [1], "ValueError: told"),
        ("import sys; sys.exit('a reason')", [1], "a reason"),
        ("import os; os.abort()", [None], ""),
        (
            "import threading\nthreading.Timer(0.3, print, ['late']).start()",
            [0],
            "late",
        ),
        ("file = open('left-open.txt', 'w')\nfile.write('kept')\nprint('written')", [0], "written"),
    ],
    ids=["return", "exception", "words", "abort", "thread", "file"],
)
def test_a_fork_ends_as_a_fresh_interpreter_does(site: Site, body: str, codes: list[int | None], words: str) -> None:
    (site.folder / "body.py").write_text(f"import os\nos.chdir({str(site.folder)!r})\n{body}\n")
    happened = site.run_module([*MODULE, "body"])
    ended = [event for event in happened if isinstance(event, RankEnded)]
    assert [event.exit_code for event in ended] == codes * 2 if codes != [0] else not ended
    if codes == [None]:
        assert {event.signal for event in ended} == {signal.SIGABRT}
    assert words in site.log(0)
    assert "nanobind" not in site.log(0)
    assert not (site.folder / "left-open.txt").exists() or (site.folder / "left-open.txt").read_text() == "kept"


def test_ranks_of_an_interpreter_that_cannot_be_forked_are_fresh_ones(site: Site, tmp_path: Path) -> None:
    """A site may start a thread in each of its interpreters."""
    (site.folder / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='of the site').start()\n"
    )
    (site.folder / "body.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    assert site.run_module([*MODULE, "body"]) == [StepEnded(0)]
    assert site.log(0) == "False\n"
    assert (
        "ranks start as fresh interpreters: an import has started threads: of the site"
        in (site.run.logs / "agent.log").read_text()
    )


def test_a_zygote_that_has_died_costs_time_only(site: Site) -> None:
    (site.folder / "body.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    assert site.run_module([*MODULE, "body"]) == [StepEnded(0)]
    assert site.log(0) == "True\n"
    (agent,) = site.starter._processes
    (zygote,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(zygote), signal.SIGKILL)
    happened = site.run_module([*MODULE, "body"])
    assert happened[-1] == StepEnded(0), happened
