"""When the environment is copied to the nodes. How a run continues without a copy."""

import errno
import math
import os
import signal
import venv
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import pytest

from tests.process_limits import ChangeLimits
from tests.waiting import wait_for
from toolkit.base import this_node
from toolkit.base.process_limits import limits
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.nodes.agent.messages import NodeStaged, StageOrder, WarmOrder, ZygoteReady
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.children import start_child
from toolkit.nodes.start.launcher import AgentLauncher
from toolkit.plugins.staging import supervisor_side as staging
from toolkit.plugins.staging.archive import ArchiveSource
from toolkit.plugins.staging.supervisor_side import ImportFigures, NodeStaging
from toolkit.run.attempt.journal import Journal
from toolkit.run.job.nodes import Nodes
from toolkit.run.supervise.rank_stop import StopAsked

HOSTS = ("node1", "node2")


class NoAgents:
    """Plays the agents of all nodes, and keeps what they are sent."""

    def __init__(self) -> None:
        self.lock, self.hosts, self.listeners = nullcontext(), HOSTS, ()
        self.silent_hosts: frozenset[str] = frozenset()
        self.sent: list[tuple[str, Any]] = []

    def send(self, host: str, message: Any) -> None:
        self.sent.append((host, message))

    def send_all(self, message: Any) -> None:
        self.sent.append(("all", message))


class NoLauncher(AgentLauncher):
    """Starts nothing on the nodes, which have a zygote each."""

    def __init__(self) -> None:
        self.played = NoAgents()
        self.agents, self.holds_zygotes, self._is_warm = cast(Any, self.played), False, True

    @property
    def orders(self) -> list[Any]:
        return [message for _, message in self.played.sent if isinstance(message, StageOrder)]


class Start:
    """One start of a job whose agents the test plays."""

    def __init__(self, folder: Path, stage: str = "auto", data: tuple[str, ...] = (), launcher: Any = None) -> None:
        config = JobConfig()
        config.cluster.stage, config.data.stage = stage, list(data)
        run, allocation = rundir.create("test", folder), Allocation(HOSTS, (1, 1), 1)
        nodes = Nodes(run, allocation, spare=0, allow_fewer=False)
        self.launcher = launcher or NoLauncher()
        self.journal = Journal(run, allocation, nodes)
        self.staging = NodeStaging(run, config, allocation, self.launcher, self.journal.note_staging)
        self.staging.decide()
        self.staging.begin()

    @property
    def told(self) -> str:
        return "\n".join(self.journal.staging)

    def import_all(self, import_s: float, waited_s: float, *, is_of_a_copy: bool = False) -> None:
        for host in HOSTS:
            self.staging.take_message(host, ZygoteReady(import_s, waited_s, is_of_a_copy, has_torch=True))

    def request(self) -> Any:
        wait_for(self.staging._is_packed.is_set, 20, "packages")
        orders = self.launcher.orders
        return orders[0].request if orders else None

    def copy_all(self, took_s: float, *problems: str, damaged: tuple[str, ...] = ()) -> None:
        for host in HOSTS:
            self.copied(host, *problems, took_s=took_s, damaged=damaged)

    def copied(self, host: str, *problems: str, took_s: float, damaged: tuple[str, ...] = ()) -> None:
        self.staging.take_message(host, NodeStaged({}, problems, damaged, took_s))

    def says(self, text: str) -> None:
        wait_for(lambda: text in self.told, 20, f"{text!r} in {self.told!r}")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small environment, on a disk that counts as shared."""
    prefix = tmp_path / "venv"
    venv.create(prefix, symlinks=True, with_pip=False)
    monkeypatch.setattr(staging, "environment_source", lambda: ArchiveSource(str(prefix), "bin/python"))
    monkeypatch.setattr(this_node, "is_shared", lambda path: True)
    return prefix


def test_an_environment_on_the_node_s_own_disk_is_never_copied(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_node, "is_shared", lambda path: False)
    start = Start(tmp_path)
    start.import_all(30.0, 25.0)
    assert not start.launcher.holds_zygotes
    assert start.launcher.orders == []


def test_auto_copies_in_the_background_what_has_waited_for_the_disk(environment: Path, tmp_path: Path) -> None:
    start = Start(tmp_path)
    assert not start.launcher.holds_zygotes
    start.import_all(9.0, 6.5)
    [made] = start.request()["packages"]
    [order] = start.launcher.orders
    assert (made["source"], order.wait_s) == (str(environment), 0.0)
    start.copy_all(took_s=2.0)
    start.says("nodes with a copy: 2 of 2, made within 2.0 s")
    assert "imports took 9.0 s, of this 6.5 s in wait for files" in start.told

    # the next job knows that it pays, and waits, but no longer than its imports would
    later = Start(tmp_path)
    assert later.launcher.holds_zygotes
    later.request()
    assert 0.0 < later.launcher.orders[0].wait_s < 6.5
    assert later.launcher.played.sent[-1] == ("all", WarmOrder())  # after the orders to copy
    later.copy_all(took_s=0.0)
    later.staging.wait(HOSTS, SimpleQueue())
    later.import_all(2.4, 0.1, is_of_a_copy=True)
    later.says("imports took 2.4 s from the nodes' copies, 9.0 s from the shared disk")


@pytest.mark.parametrize(
    ("figures", "waited_s"),
    [
        pytest.param(None, 0.5, id="imports hardly wait"),
        pytest.param(ImportFigures(import_s=9.0, waited_s=6.5, copied_s=20.0), 6.5, id="a copy takes longer"),
    ],
)
def test_auto_refuses_what_does_not_pay(
    environment: Path, tmp_path: Path, figures: ImportFigures | None, waited_s: float
) -> None:
    if figures is not None:
        Start(tmp_path).staging._keep_figures(
            import_s=figures.import_s, waited_s=figures.waited_s, copied_s=figures.copied_s
        )
    start = Start(tmp_path)
    start.import_all(9.0, waited_s)
    start.says("the environment is not copied to the nodes: imports took 9.0 s")
    assert start.launcher.orders == []


def test_auto_refuses_an_environment_that_is_too_large_for_the_gain(
    environment: Path, tmp_path: Path, change_limits: ChangeLimits
) -> None:
    change_limits(copied_bytes_per_s=1.0)
    start = Start(tmp_path)
    start.import_all(9.0, 6.5)
    start.says("a node would take longer to copy that than its imports wait")
    assert start.request() is None


def test_always_waits_for_the_copies_and_a_signal_ends_the_wait(environment: Path, tmp_path: Path) -> None:
    start, events = Start(tmp_path, "always"), SimpleQueue[Any]()
    assert start.launcher.holds_zygotes
    start.request()
    assert 1700 < start.launcher.orders[0].wait_s <= limits().copies_s
    events.put(StopAsked(signal.SIGTERM))
    start.staging.wait(HOSTS, events)
    assert events.get() == StopAsked(signal.SIGTERM)
    assert "not ready in time" in start.told
    # a node that is lost is not waited for
    start.staging.agent_ended("node2", "it is lost")
    start.copied("node1", "no room", took_s=0.0)
    start.staging.wait(HOSTS, SimpleQueue())
    assert "nodes with a copy: 0 of 1" in start.told


def test_what_cannot_be_copied_is_named_and_the_run_goes_on(environment: Path, tmp_path: Path) -> None:
    closed, file = tmp_path / "none", tmp_path / "file"
    file.write_text("x")
    start = Start(tmp_path, "never", (str(closed), str(file)))
    [made] = start.request()["packages"]
    assert made["source"] == str(file)
    assert f"{closed} is not copied to the nodes: {closed}: No such file or directory" in start.told
    nothing = Start(tmp_path, "never", (str(closed),))
    nothing.staging.wait(HOSTS, SimpleQueue())
    assert nothing.launcher.played.sent == [("all", WarmOrder())]


def test_output_of_a_library_or_a_cut_line_of_the_packer_leaves_the_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the thread ended with a traceback, and nothing was copied."""
    file = tmp_path / "file"
    file.write_text("x")

    def talks(command: Sequence[str], *args: Any, **options: Any) -> Any:
        script = 'echo "a library says hello"; echo "[1]"; "$@"; printf \'{"source": "/da\'; kill -9 $$'
        return start_child(["bash", "-c", script, "bash", *command], *args, **options)

    monkeypatch.setattr(staging, "start_child", talks)
    start = Start(tmp_path, "never", (str(file),))
    [made] = start.request()["packages"]
    assert made["source"] == str(file)
    for line in ("a library says hello", "[1]", '{"source": "/da'):
        assert f"the packer has printed: {line}\n" in caplog.text
    start.says("packing for the nodes has failed with exit code -9")


def test_figures_and_packages_in_a_folder_that_others_may_write_to_are_refused(
    environment: Path, tmp_path: Path
) -> None:
    cache = tmp_path / ".stage"
    cache.mkdir()
    cache.chmod(0o777)
    start = Start(tmp_path, "always", data=(__file__,))
    start.says("the environment is not copied to the nodes: copies for the nodes: ")
    start.says(f"{__file__} is not copied to the nodes: copies for the nodes: ")
    assert start.request() is None  # nothing to copy
    start.staging._keep_figures(import_s=1.0)
    assert list(cache.iterdir()) == []


def test_a_damaged_package_is_thrown_away(environment: Path, tmp_path: Path) -> None:
    start = Start(tmp_path, "always")
    [made] = start.request()["packages"]
    start.copy_all(1.0, "it is damaged", damaged=(made["key"],))
    assert not Path(made["file"]).exists()


def test_where_nothing_can_be_copied_the_reason_is_told(environment: Path, tmp_path: Path) -> None:
    start = Start(tmp_path, "always", launcher=object())
    start.staging.wait(HOSTS, SimpleQueue())
    assert "the ranks are started by srun" in start.told
    assert start.staging._deadline == math.inf


@pytest.mark.parametrize("is_data", [False, True])
def test_copies_are_not_waited_for_without_limit(
    environment: Path, tmp_path: Path, change_limits: ChangeLimits, *, is_data: bool
) -> None:
    change_limits(copies_s=1.0)
    data = tmp_path / "file"
    data.write_text("x")
    start = Start(tmp_path, "never", (str(data),)) if is_data else Start(tmp_path, "always")
    start.request()
    assert start.launcher.orders[0].wait_s <= 1.0
    start.staging.wait(HOSTS, SimpleQueue())
    assert "the copies are not ready in time, within 1 s: this start runs without them" in start.told


def test_a_silent_node_is_not_waited_for(environment: Path, tmp_path: Path) -> None:
    start = Start(tmp_path, "always")
    start.request()
    start.copied("node1", took_s=1.0)
    start.launcher.played.silent_hosts = frozenset({"node2"})
    start.staging.wait(HOSTS, SimpleQueue())
    assert "nodes with a copy: 1 of 1" in start.told


def test_figures_that_cannot_be_read_now_are_measured_again(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(path: Path) -> ImportFigures:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(ImportFigures, "read_or_none", fails)
    start = Start(tmp_path)
    start.import_all(9.0, 0.5)
    start.says("the environment is not copied to the nodes: imports took 9.0 s")
    assert "cannot be read" in caplog.text
