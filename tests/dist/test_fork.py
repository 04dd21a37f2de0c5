"""A forked rank sees the same as a fresh interpreter with the same imports."""

import json
import os
import py_compile
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.waiting import PATIENCE
from toolkit.base import fsio
from toolkit.config import SCRIPT_JOB, JobConfig, dump_config
from toolkit.files import rundir
from toolkit.nodes.agent import preimports
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start import user_script
from toolkit.nodes.start.agent_starters import LocalAgent
from toolkit.nodes.start.agents import Agents
from toolkit.nodes.start.launcher import MODULE, AgentLauncher, AllRanksEnded, RanksExited, RanksSucceeded

pytestmark = [pytest.mark.dist, pytest.mark.sample(5)]
TIMEOUT_S = 60 * PATIENCE

#: Says all that a program can see of itself; what must differ comes apart.
PROBE = Path(__file__).with_name("fork_probe.py")


class Site:
    def __init__(self, folder: Path) -> None:
        (folder / "probe.py").write_text(PROBE.read_text())
        self.run = rundir.create("fork", folder / "runs")
        self.run.config.write_text(dump_config(JobConfig()))
        self.folder, self.events, self.attempt = folder, SimpleQueue[Any](), 0
        self.allocation = Allocation(("here",), (2,), 1)
        self.begin_job()

    def begin_job(self) -> None:
        self.starter = LocalAgent(self.run)
        self.agents = Agents(self.run, self.allocation, self.starter)
        self.launcher = AgentLauncher(self.run, self.allocation, self.agents)
        self.is_prepared = False

    def run_module(self, command: list[str], **changed: str) -> list[Any]:
        """What happens to two ranks that become ``command``, but for ends with exit code 0."""
        self.attempt += 1
        path = f"{self.folder}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        environ = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", **changed}
        if not self.is_prepared:
            self.launcher.listen(command, environ, self.events)
            self.launcher.start_agents(self.allocation.hosts)
            self.is_prepared = True
        store = self.launcher.start_store(self.attempt, 2, "127.0.0.1", environ)
        self.launcher.start(self.attempt, self.allocation, command, environ, store)
        happened: list[Any] = []
        while not happened or not isinstance(happened[-1], AllRanksEnded):
            happened.append(self.events.get(timeout=TIMEOUT_S))
        store.close()
        return [event for event in happened if not isinstance(event, RanksSucceeded)]

    def run_command(self, words: list[str], *, fresh: bool = False, **changed: str) -> list[Any]:
        """Run two ranks of `toolkit exec -- WORDS`, and return the events. ``fresh`` ranks are not forked."""
        fsio.write_atomic(self.run.config, dump_config(JobConfig(job=SCRIPT_JOB, argv=words)))
        command = [*MODULE, user_script.__name__, str(self.run.config)]
        changed = {"TOOLKIT_RUN_DIR": str(self.run.path), "OMP_NUM_THREADS": "3", **changed}
        return self.run_module(["env", *command] if fresh else command, **changed)

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
    compare(site, fresh, forked)


@pytest.mark.parametrize("words", [["probe.py"], ["-u", "-X", "faulthandler", "-m", "probe"]], ids=["script", "module"])
def test_a_script_finds_in_a_fork_what_it_finds_in_a_fresh_interpreter(
    site: Site, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, forked = site.folder / "fresh", site.folder / "forked"
    monkeypatch.chdir(site.folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for folder in (fresh, forked):
        folder.mkdir()
        command = ["python3", *words, str(folder), "3"]
        happened = site.run_command(command, fresh=folder == fresh, WORD=folder.name, MASTER_PORT="1")
        assert [event.exit_code for event in happened] == [3, 3, 3], site.log(0)
    compare(site, fresh, forked)


LEARNER = """
import json, sys, time
from pathlib import Path
from toolkit.nodes.agent import preimports
print("wave" in sys.modules, flush=True)
import wave
path = Path(sys.argv[1])
preimports.record_imports(path)
while json.loads(path.read_text())["left_out"] is None:
    time.sleep(0.1)
"""


def test_what_ranks_import_is_there_in_later_attempts_and_in_the_next_job(site: Site) -> None:
    (site.folder / "learner.py").write_text(LEARNER)
    command = [*MODULE, "learner", str(site.run.path / preimports.NAME)]
    assert [event.exit_code for event in site.run_module(command)] == [0], site.log(0)
    assert site.log(0).splitlines() == ["False"]
    site.run_module(command)
    assert site.log(0).splitlines() == ["True"]
    site.agents.close()
    site.begin_job()
    site.run_module(command)
    assert site.log(0).splitlines() == ["True"]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a site with one zygote for all scripts here. The current folder is not theirs."""
    site = Site(tmp_path_factory.mktemp("scripts"))
    (site.folder / "project" / "data").mkdir(parents=True)
    (site.folder / "project" / "data" / "words.txt").write_text("a file beside the script")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(site.folder / "project" / "data")
        # The first command decides whether ranks are forked, whichever test comes first.
        (site.folder / "first.py").write_text("import torch")
        site.run_command([sys.executable, str(site.folder / "first.py")])
        yield site
        site.agents.close()


#: The first lines of each script.
PROLOGUE = """import os, sys
if __name__ == "__main__": print("torch" in sys.modules, file=open("had-torch.txt", "w"))
def unused():
    import torch
"""


@pytest.mark.parametrize(
    "body",
    [
        "def deeper(): raise ValueError('told')\ntry: 1 / 0\nexcept ArithmeticError: deeper()",
        "sys.exit('a reason')",
        "sys.exit(7)",
        "import signal; signal.raise_signal(signal.SIGINT)",
        "import signal; signal.raise_signal(signal.SIGTERM)",
        "sys.excepthook = lambda *said: print(said[:2], said[2].tb_next)\n{}['key']",
        "import atexit, threading\natexit.register(print, 'at the end')\n"
        "threading.Thread(target=lambda: threading.Event().wait(0.2) or print('in a thread')).start()",
        "print(open(os.path.join(os.path.dirname(__file__), 'data', 'words.txt')).read(), os.listdir())",
        "import warnings; warnings.warn('about this line')",
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [1, 2]))",
        "import subprocess; print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.path, sys.flags)'],"
        "capture_output=True))",
        "sys.path.insert(0, os.path.dirname(__file__) + '/data/lib')\nimport toolkit; print(toolkit.__file__)",
        "import toolkit; print(toolkit.__file__)",
        "import pickle\nclass Own: pass\nprint(pickle.dumps(Own()))",
        "class Own:\n    def __del__(self): print('freed', os.getcwd() != '/')\nkept = Own()\nkept.itself = kept",
        "import ctypes; ctypes.CDLL(None).printf(b'written by C, and buffered there')",
        "import atexit\nclass Bad:\n    __repr__ = lambda _: 'Bad'\n"
        "    def __call__(self): 1 / 0\natexit.register(Bad())",
        "sys.exit(-1)",
        "sys.stdout.close()",
        "import subprocess; kept = subprocess.Popen(['sleep', '600']); print(kept.poll())",
    ],
    ids=lambda body: body.strip().splitlines()[-1][-30:],
)
def test_a_script_does_in_a_fork_what_it_does_in_a_fresh_interpreter(scripts: Site, body: str) -> None:
    (scripts.folder / "project" / "data" / "lib" / "toolkit").mkdir(parents=True, exist_ok=True)
    (scripts.folder / "project" / "data" / "lib" / "toolkit" / "__init__.py").touch()
    (scripts.folder / "project" / "train.py").write_text(PROLOGUE + body)
    assert_same(scripts, [sys.executable, "../train.py", "--lr", "1"], is_fork=True)


def assert_same(site: Site, command: list[str], *, is_fork: bool) -> None:
    seen = []
    for fresh in (True, False):
        happened = site.run_command(command, fresh=fresh)
        ends = [(event.ranks, event.how) if isinstance(event, RanksExited) else event for event in happened]
        seen.append([sorted(map(str, ends)), site.log(0)])
        assert Path("had-torch.txt").read_text() == f"{is_fork and not fresh}\n"
    assert seen[1] == seen[0]


def test_a_module_of_a_package_is_run_in_a_fork(scripts: Site) -> None:
    package = Path("pack")
    package.mkdir()
    (package / "__init__.py").write_text("print(__name__, __file__)")
    (package / "inner.py").write_text("def fail(): raise ValueError('inside')")
    (package / "__main__.py").write_text(PROLOGUE + "from .inner import fail\nprint(sys.argv, __spec__.name)\nfail()")
    assert_same(scripts, [sys.executable, "-m", "pack", "x"], is_fork=True)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("torch/__init__.py", "import torch; print(torch.__file__)"),
        ("random.py", "import random; print(random.__file__)"),
        ("random.pyc", "import random; print(random.__file__)"),
    ],
)
def test_a_module_that_hides_one_of_what_is_loaded_is_imported(scripts: Site, name: str, body: str) -> None:
    folder = scripts.folder / f"hiding-{name.partition('/')[0]}"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).touch()
    if name.endswith("c"):
        py_compile.compile(os.devnull, str(folder / name), doraise=True)
    (folder / "train.py").write_text(PROLOGUE + body)
    scripts.run_command([sys.executable, str(folder / "train.py")])
    *notes, said = scripts.log(0).splitlines()
    assert said == str(folder / name)
    assert "has the name of one that is loaded" in notes[0]


@pytest.mark.parametrize("options", [["-O"], ["-W", "error"], ["-X", "dev"], ["-I"], ["-c"]], ids=str)
def test_an_option_that_a_fork_cannot_obey_is_obeyed(scripts: Site, options: list[str]) -> None:
    (scripts.folder / "project" / "train.py").write_text(PROLOGUE + "print(sys.flags, sys.warnoptions)")
    last = f"exec(open('{scripts.folder}/project/train.py').read())" if options == ["-c"] else "../train.py"
    assert_same(scripts, [sys.executable, *options, last], is_fork=False)


def compare(site: Site, fresh: Path, forked: Path) -> None:
    """Compare the probes of two ranks: attempt 1 wrote to ``fresh``, attempt 2 to ``forked``."""
    assert "forked from a process" in (site.run.logs / "agent-here.log").read_text()
    values = {
        folder.name: [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        for folder in (fresh, forked)
    }
    for rank in range(2):
        (wanted, _, fresh_modules), (got, _, modules) = values["fresh"][rank], values["forked"][rank]
        text = json.dumps(wanted).replace(str(fresh), str(forked)).replace('"WORD": "fresh"', '"WORD": "forked"')
        wanted = json.loads(text.replace("attempt-001", "attempt-002"))
        assert {name: (value, wanted[name]) for name, value in got.items() if value != wanted[name]} == {}
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
    ended = [event for event in happened if isinstance(event, RanksExited)]
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
    assert site.run_module([*MODULE, "body"]) == [AllRanksEnded(0)]
    assert site.log(0) == "False\n"
    assert (
        "ranks start as fresh interpreters: an import has started threads: of the site"
        in (site.run.logs / "agent-here.log").read_text()
    )


def test_a_zygote_that_has_died_costs_time_only(site: Site) -> None:
    (site.folder / "body.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    assert site.run_module([*MODULE, "body"]) == [AllRanksEnded(0)]
    assert site.log(0) == "True\n"
    (agent,) = site.starter._processes
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    (zygote,) = (pid for pid in children if b"toolkit.nodes.agent.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(zygote), signal.SIGKILL)
    happened = site.run_module([*MODULE, "body"])
    assert happened[-1] == AllRanksEnded(0), happened
