"""The signs of life of a rank that is watched from outside. They are read from files as /proc has them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from toolkit.devices.on_node import Gpus, GpusError, Load
from toolkit.files.rundir import RANK_VARIABLE, RunDir
from toolkit.plugins.node_watch import silent_scripts
from toolkit.plugins.node_watch.silent_scripts import GpuUse, RankProcesses, SilentRankDetector

RUN = RunDir(Path("/runs/mine/20261122-1"))
BOUND_S = 300.0
#: As Linux 6.18 writes it: parent, pages fetched, CPU in ticks (user and system) and start are filled in.
STAT = (
    "{pid} ({name}) {state} {parent} 11772 11772 0 -1 4194304 98125 5093 {pages} 6 {user} {system} 55 17 20 0 18 "
    "0 {started} 3605864448 135990 18446744073709551615 1 1 0 0 0 0 0 16781312 16386 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0\n"
)
IO = "rchar: {rchar}\nwchar: 9054\nsyscr: 9531\nsyscw: 181\nread_bytes: 2101248\nwrite_bytes: 4096\n"


class Machine:
    """A /proc made by the test, a clock, and a GPU."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.now = 0.0
        self.gpu_is_busy = False
        proc.mkdir()
        (proc / "uptime").write_text("90000.00 170000.00\n")
        (proc / "loadavg").write_text("0.3 0.2 0.1 1/321 777\n")
        self.process(1, parent=0)

    def process(
        self,
        pid: int,
        parent: int = 1,
        rank: int | None = None,
        attempt: int = 2,
        run: RunDir = RUN,
        started: int = 4000,
    ) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        mark = "" if rank is None else f"{RANK_VARIABLE}={run.rank_tag(attempt, rank)}\0"
        (folder / "environ").write_text(f"HOME=/h\0{mark}SLURMD_NODENAME=node1\0")
        (folder / "status").write_text("Name:\tpython\nState:\tS (sleeping)\nTracerPid:\t0\nUid:\t0\t0\t0\t0\n")
        self.uses(pid, parent=parent, started=started)

    def uses(
        self,
        pid: int,
        parent: int = 1,
        cpu: int = 300,
        rchar: int = 5,
        pages: int = 0,
        started: int = 4000,
        state: str = "S",
        name: str = "python (a) b",
    ) -> None:
        stat = STAT.format(
            name=name, pid=pid, state=state, parent=parent, pages=pages, user=cpu, system=7, started=started
        )
        (self.proc / f"{pid}/stat").write_text(stat)
        (self.proc / f"{pid}/io").write_text(IO.format(rchar=rchar))

    def ends(self, pid: int) -> None:
        for path in (self.proc / str(pid)).iterdir():
            path.unlink()
        (self.proc / str(pid)).rmdir()

    def processes(self) -> RankProcesses:
        return RankProcesses(RUN, 2, self.proc)

    def watch(self) -> SilentRankDetector:
        return SilentRankDetector(self.processes(), BOUND_S, lambda: self.gpu_is_busy, lambda: self.now)

    def pids(self) -> dict[int, set[int]]:
        return {rank: {pid for pid, _ in usages} for rank, usages in self.processes().read().items()}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    return Machine(tmp_path / "proc")


def looks(
    machine: Machine, watch: SilentRankDetector, seconds: float, each: Callable[[float], None] = lambda _: None
) -> list[str]:
    """Return what the watch says within ``seconds``, with a look every ten."""
    said = []
    until = machine.now + seconds
    while machine.now < until:
        machine.now += 10
        each(machine.now)
        said += ["rank {rank} {state} {still_s:.0f}".format(**message) for message in watch.look()]
    return said


def test_a_rank_is_all_that_began_with_its_mark_and_what_these_have_started(machine: Machine) -> None:
    machine.process(10, rank=3)  # bash
    machine.process(11, parent=10, rank=3)  # python
    machine.process(12, parent=11)  # a program that was started with an empty environment
    machine.process(13, parent=1, rank=3)  # a worker that has left its parent
    machine.process(20, rank=4)
    machine.process(21, parent=1)
    assert machine.pids() == {3: {10, 11, 12, 13}, 4: {20}}


def test_what_another_run_attempt_or_node_has_started_is_no_rank_of_ours(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.process(10, rank=0, attempt=1)
    machine.process(11, rank=0, attempt=22)
    machine.process(12, rank=0, run=RunDir(Path("/runs/mine/20261122-11")))
    assert machine.pids() == {}
    machine.process(13, rank=0)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    assert machine.pids() == {0: {13}}
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    assert machine.pids() == {}


def test_a_process_that_has_ended_and_waits_for_its_parent_is_not_counted(machine: Machine) -> None:
    machine.process(10, rank=0)
    machine.process(11, parent=10, rank=0)
    machine.uses(11, parent=10, state="Z")
    assert machine.pids() == {0: {10}}


@pytest.mark.parametrize(
    ("before", "after"),
    [({"started": 8_999_900}, {"started": 8_999_900, "rank": 0}), ({"rank": 0}, {"started": 5000})],
    ids=["a process of a second that becomes the script", "another process that has got the number"],
)
def test_an_environment_is_read_again_where_it_may_have_changed(
    machine: Machine, before: dict[str, int], after: dict[str, int]
) -> None:
    machine.process(10, **before)  # type: ignore[arg-type]
    processes = machine.processes()
    assert set(processes.read()) == ({0} if "rank" in before else set())
    machine.process(10, **after)  # type: ignore[arg-type]
    assert set(processes.read()) == ({0} if "rank" in after else set())


def test_a_rank_without_a_sign_of_life_is_silent_after_the_bound_and_not_before(machine: Machine) -> None:
    machine.process(10, rank=0)
    watch = machine.watch()
    assert looks(machine, watch, 310) == []  # counted from the second look
    assert looks(machine, watch, 20) == ["rank 0 silent 310"]
    assert looks(machine, watch, 600) == []  # it was said


def test_threads_that_wake_up_now_and_then_are_no_sign_of_life(machine: Machine) -> None:
    """A rank in a barrier of gloo takes 0.002 of a core, as measured. It had two idle data workers."""
    machine.process(10, rank=0)
    said = looks(machine, machine.watch(), 320, lambda now: machine.uses(10, cpu=300 + round(now * 0.2)))
    assert said == ["rank 0 silent 310"]


SIGNS: dict[str, Callable[[Machine, float], None]] = {
    "computes": lambda machine, now: machine.uses(11, parent=10, cpu=300 + round(now * 3)),
    "reads or writes": lambda machine, now: machine.uses(11, parent=10, rchar=int(now)),
    "fetches pages": lambda machine, now: machine.uses(11, parent=10, pages=int(now)),
    "starts processes": lambda machine, now: machine.process(100 + int(now), parent=10),
    "works on another node": lambda machine, _: machine.uses(11, parent=10, name="srun"),
    "has no processes that may be read": lambda machine, now: (machine.proc / "11/io").unlink(missing_ok=True),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_a_rank_of_which_any_process_does_something_now_and_then_is_not_silent(machine: Machine, sign: str) -> None:
    machine.process(10, rank=0)
    machine.process(11, parent=10)

    def act(now: float) -> None:
        if now % 200 == 0:
            SIGNS[sign](machine, now)

    said = looks(machine, machine.watch(), 700, act)
    assert said == (["rank 0 hidden 0"] if "may be read" in sign or "another node" in sign else [])


def test_ranks_are_not_silent_while_a_gpu_works_or_a_debugger_holds_one(machine: Machine) -> None:
    machine.process(10, rank=0)
    watch = machine.watch()
    machine.gpu_is_busy = True
    assert looks(machine, watch, 400) == []
    machine.gpu_is_busy = False
    status = machine.proc / "10/status"
    status.write_text(status.read_text().replace("TracerPid:\t0", "TracerPid:\t4711"))
    assert looks(machine, watch, 400) == []
    status.write_text(status.read_text().replace("4711", "0"))
    assert looks(machine, watch, 400)[0].startswith("rank 0 silent 3")


def test_a_rank_that_moves_again_and_one_that_ends_are_said_once(machine: Machine) -> None:
    machine.process(10, rank=0)
    machine.process(20, rank=1)
    watch = machine.watch()
    looks(machine, watch, 400)
    machine.uses(10, cpu=900)
    machine.ends(20)
    assert looks(machine, watch, 30) == ["rank 0 moving 0", "rank 1 ended 0"]


def test_time_in_which_the_whole_job_was_suspended_does_not_count(machine: Machine) -> None:
    machine.process(10, rank=0)
    watch = machine.watch()
    looks(machine, watch, 100)
    machine.now += 86_400
    assert looks(machine, watch, 150) == []
    assert looks(machine, watch, 100) != []


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("python -u -m torch.distributed.run --nproc-per-node=2 train.py", True),
        ("/x/bin/python3 /x/bin/torchrun --standalone train.py", True),
        ("python /x/bin/accelerate launch train.py", True),
        ("python train.py -m torch.distributed.run", False),
        ("python train.py torchrun", False),
        ("python -m train torchrun", False),
        ("bash -c torchrun", False),
        ("python -m", False),
        ("", False),
    ],
)
def test_torchrun_is_known_by_what_it_was_started_as(command: str, answer: bool) -> None:
    assert silent_scripts.is_torchrun(command.split()) is answer


def test_of_torchrun_only_counts_what_it_starts(machine: Machine) -> None:
    """torchrun writes to its own store all the time: 500 bytes each second, as measured."""
    machine.process(10, rank=0)
    (machine.proc / "10/cmdline").write_text("python\0-m\0torch.distributed.run\0train.py\0")
    machine.process(11, parent=10)
    watch = machine.watch()
    assert looks(machine, watch, 330, lambda now: machine.uses(10, rchar=int(now))) == ["rank 0 silent 310"]
    machine.process(12, parent=10)
    assert looks(machine, watch, 10) == ["rank 0 moving 0"]


@pytest.mark.parametrize(
    ("shares", "busy"), [((0.0, 0.37), True), ((0.0, 0.0), False), ((None,), False), ((), False), (None, False)]
)
def test_a_gpu_is_busy_where_its_driver_says_so(shares: Sequence[float | None] | None, busy: bool) -> None:
    gpus: Any = SimpleNamespace(gpus=shares, utilization=lambda share: Load(share, None, None, None))
    assert GpuUse(lambda _: None if shares is None else gpus).is_busy() is busy


def test_a_driver_that_fails_or_does_not_answer_says_nothing(change_limits: ChangeLimits) -> None:
    def fails(_: object) -> Gpus:
        raise GpusError("no devices were found")

    assert not GpuUse(fails).is_busy()
    change_limits(gpu_answer_s=0.01)
    use = GpuUse(lambda _: __import__("time").sleep(60))
    assert not use.is_busy()
    assert not use.is_busy()  # and no second thread waits for it
