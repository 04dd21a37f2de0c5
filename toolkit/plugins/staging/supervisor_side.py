"""Has the Python environment and data copied to the nodes' own disks, see `toolkit.base.staged`.

Data are what ``data.stage`` names. They, and with ``cluster.stage: always`` the environment, are copied before the
ranks start. With ``auto`` the first start on a shared disk only measures how long its imports wait for that disk. Where
copying pays, it is done in the background, for later starts. Later jobs wait for copies, but never longer than their
imports would wait for the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

from toolkit.base import fsio, logs, this_node
from toolkit.base.errors import RequestError
from toolkit.base.process_limits import limits
from toolkit.config import JobConfig
from toolkit.files import records
from toolkit.files.records import FileRecord
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.messages import Message, NodeStaged, StageOrder, ZygoteReady
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import AgentUser, Events
from toolkit.nodes.start.children import start_child
from toolkit.nodes.start.launcher import AgentLauncher, Launcher
from toolkit.plugins.staging import archive
from toolkit.plugins.staging.archive import Archive, ArchiveSource, PackAnswer, PackRequest
from toolkit.plugins.staging.copying import CopyRequest

#: What a start must gain at the least for ``auto`` to copy an environment.
LEAST_GAIN_S = 2.0
#: In the background everything else comes first.
BACKGROUND_NICE = 19
LOOK_EVERY_S = 0.2

log = logs.get(__name__)


@dataclass(frozen=True)
class ImportFigures(FileRecord):
    """What has been measured of one environment. Each is the slowest node's."""

    import_s: float | None = None  #: from the shared disk
    waited_s: float | None = None  #: of this the wait for files
    copied_s: float | None = None  #: a new copy

    @property
    def pays(self) -> bool:
        """True if a copy saves a node ``LEAST_GAIN_S`` or more, and more than it takes to make (once that is known)."""
        waited_s = self.waited_s or 0.0
        return waited_s >= LEAST_GAIN_S and (self.copied_s is None or self.copied_s < waited_s)


def environment_source() -> ArchiveSource | None:
    """Return this environment; None if it cannot be moved to another folder."""
    prefix, program = Path(sys.prefix), Path(sys.executable)
    is_movable = (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()
    if not is_movable or not program.is_relative_to(prefix):
        return None
    return ArchiveSource(str(prefix), str(program.relative_to(prefix)))


class NodeStaging(AgentUser):
    """Decides what is copied, and follows the copying. ``tell`` gets a line for each result."""

    def __init__(
        self, run: RunDir, config: JobConfig, allocation: Allocation, launcher: Launcher, tell: Callable[[str], None]
    ) -> None:
        self._run, self._config, self._tell = run, config, tell
        self._launcher = launcher if isinstance(launcher, AgentLauncher) else None
        self._hosts = {*allocation.without_spares(config.cluster.spare_nodes).hosts}
        self._has_gpus = allocation.gpus_per_node > 0
        self._cache = run.path.parent.parent / ".stage"
        self._environment = environment_source()
        self._data = [ArchiveSource(str(fsio.expand(path).absolute())) for path in config.data.stage]
        self._first: list[ArchiveSource] = []  #: what ranks wait for
        self._limit_s = limits().copies_s  #: the longest time that ranks wait for it
        self._deadline = math.inf  #: the end of that time, monotonic
        self._measures = False
        self._figures = ImportFigures()
        self._packages: dict[str, Archive] = {}
        self._is_packed = threading.Event()
        self._imported: dict[str, ZygoteReady] = {}  #: by host
        self._copied: dict[str, NodeStaged] = {}
        self._lost: set[str] = set()
        self._orders: list[StageOrder] = []  #: also for agents that connect later

    # ------------------------------------------------------------------------------------------ for the supervisor

    def decide(self) -> None:
        """Decide what the ranks wait for. To be called before the agents are started."""
        if self._launcher is None or self._config.cluster.container is not None:
            why = "the ranks use what is in the image of cluster.container"
            if self._launcher is None:
                why = "the ranks are started by srun, not by the agents"
            if self._config.cluster.stage == "always" or self._data:
                self._note(f"nothing is copied to the nodes: {why}", is_problem=True)
            return
        agents = self._launcher.agents
        agents.listeners = (*agents.listeners, self)
        self._decide_environment()
        self._first += self._data
        if self._data:
            self._limit_s = limits().copies_s
        if self._first:
            self._deadline = time.monotonic() + self._limit_s
            self._launcher.holds_zygotes = True  # they would import from the shared disk

    def _decide_environment(self) -> None:
        stage, source = self._config.cluster.stage, self._environment
        if stage == "never":
            return
        try:
            archive.refuse_cache_of_others(self._cache)
        except (RequestError, OSError) as error:
            self._note(f"the environment is not copied to the nodes: {error}", is_problem=True)
            return
        if source is None:
            if stage == "always":
                log.warning("the environment is not copied: %s is neither a venv nor one of conda's", sys.prefix)
            return
        try:
            self._figures = ImportFigures.read_or_none(self._figures_file) or self._figures
        except OSError as error:
            log.warning("%s: cannot be read: %s", self._figures_file, error)
        # With ``auto`` a start waits for a copy only if earlier starts have measured that one pays.
        if stage == "always":
            self._first.append(source)
        elif not this_node.is_shared(Path(source.path)):
            log.info("the environment is not copied: %s is on a disk of this node", source.path)
        elif self._figures.copied_s is not None and self._figures.pays:
            self._first.append(source)
            self._limit_s = self._figures.waited_s or 0.0
        else:
            self._measures = True

    def begin(self) -> None:
        """Begin to pack and to copy. To be called when the agents can be reached."""
        if self._first:
            self._in_thread(self._first, is_awaited=True)

    def wait(self, hosts: Collection[str], events: Events) -> None:
        """Wait until ``hosts`` have their copies, or the gain is used up. A signal in ``events`` ends the wait."""
        if not self._first:
            return
        while not self._is_done(hosts) and time.monotonic() < self._deadline:
            with contextlib.suppress(Empty):
                events.put(events.get(timeout=LOOK_EVERY_S))
                break
        if self._is_done(hosts):
            self._summarize(hosts)
        elif self._launcher is not None:
            limit = f", within {self._limit_s:.0f} s" if time.monotonic() >= self._deadline else ""
            self._note(f"the copies are not ready in time{limit}: this start runs without them", is_problem=True)
            self._launcher.warm_zygotes()

    def _is_done(self, hosts: Collection[str]) -> bool:
        silent = frozenset[str]() if self._launcher is None else self._launcher.agents.silent_hosts
        done = self._copied.keys() | self._lost | silent
        return self._is_packed.is_set() and (not self._packages or {*hosts} <= done)

    # ------------------------------------------------------------------------------------------------------ packing

    def _in_thread(self, sources: Sequence[ArchiveSource], *, is_awaited: bool, most_bytes: int | None = None) -> None:
        def carry_out() -> None:
            nice = 0 if is_awaited else BACKGROUND_NICE
            request = PackRequest(str(self._cache), tuple(sources), self._has_gpus, most_bytes, nice)
            packages: list[Archive] = []
            try:
                packages = self._pack(request)
            finally:  # the start waits for this
                self._packages |= {each.key: each for each in packages}
                left_s = max(0.0, self._deadline - time.monotonic()) if is_awaited else 0.0
                self.request_copies(CopyRequest(tuple(packages), self._config.cluster.stage_dir, nice), wait_s=left_s)
                self._is_packed.set()

        threading.Thread(target=carry_out, daemon=True).start()

    def request_copies(self, request: CopyRequest, *, wait_s: float) -> None:
        """Have all agents copy, if there is anything. What they start waits for it at most ``wait_s``."""
        assert self._launcher is not None
        with self._launcher.agents.lock:
            if request.packages:
                order = StageOrder(request.to_json(), wait_s)
                self._orders.append(order)
                self._launcher.agents.send_all(order)
            self._launcher.warm_zygotes()

    def _pack(self, request: PackRequest) -> list[Archive]:
        """Have the packages made by a separate process: they may take minutes."""
        command = [sys.executable, "-P", "-m", "toolkit.plugins.staging.archive"]
        packages: list[Archive] = []
        try:
            packer = start_child(
                command,
                os.environ,
                end_by=signal.SIGKILL,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            output, _ = packer.communicate(json.dumps(request.to_json()))
        except OSError as error:
            self._note(f"nothing is copied to the nodes: {error}", is_problem=True)
            return []
        # One line for each source.
        for line in output.splitlines():
            try:
                answer = records.decode(PackAnswer, json.loads(line))
            except (ValueError, RecursionError):  # of a library, or cut off where the packer was killed
                log.warning("the packer has printed: %.200s", line)
                continue
            if answer.package is not None:
                packages.append(answer.package)
            elif answer.problem is not None:
                self._note(f"{answer.source} is not copied to the nodes: {answer.problem}", is_problem=True)
        if packer.returncode != 0:
            self._note(f"packing for the nodes has failed with exit code {packer.returncode}", is_problem=True)
        return packages

    # ------------------------------------------------------------------------- while the lock of the agents is held

    def agent_connected(self, host: str) -> None:
        assert self._launcher is not None
        for order in self._orders:
            self._launcher.agents.send(host, order)

    def take_message(self, host: str, message: Message) -> None:
        # Files are written in threads: the shared disk may be slow.
        if isinstance(message, ZygoteReady):
            self._imported[host] = message
            if not self._hosts <= self._imported.keys() | self._lost:
                return
            if all(imported.is_of_a_copy for imported in self._imported.values()):
                took_s = max(imported.import_s for imported in self._imported.values())
                before = (
                    "" if self._figures.import_s is None else f", {self._figures.import_s:.1f} s from the shared disk"
                )
                self._note(f"imports took {took_s:.1f} s from the nodes' copies{before}")
            elif self._measures:
                self._measures = False
                threading.Thread(target=self._judge_imports, daemon=True).start()
        elif isinstance(message, NodeStaged):
            is_first = host not in self._copied
            self._copied[host] = message
            for problem in message.problems:
                log.warning("node %s: %s: it uses the original", host, problem)
            for key in message.damaged:
                archive.discard(self._packages[key])
            if is_first and not self._first and self._hosts <= self._copied.keys() | self._lost:
                threading.Thread(target=self._summarize, args=[self._hosts], daemon=True).start()

    def agent_ended(self, host: str, why: str) -> None:
        self._lost.add(host)

    agent_missing = agent_ended

    # ---------------------------------------------------------------------------------------------------- the figures

    @property
    def _figures_file(self) -> Path:
        name = hashlib.sha256(os.fsencode(sys.prefix)).hexdigest()[:16]
        return self._cache / f"{name}.imports"  # no package's record

    def _keep_figures(self, **figures: float) -> None:
        self._figures = self._figures.replace(**figures)
        try:
            fsio.make_dir(self._cache, parents=0)
            archive.refuse_cache_of_others(self._cache)
            fsio.write_json(self._figures_file, self._figures.to_json())
        except (RequestError, OSError) as error:
            log.warning("%s: cannot be written: %s", self._figures_file, error)

    def _judge_imports(self) -> None:
        """Copy the environment in the background if that pays."""
        slowest = max(self._imported.values(), key=lambda message: message.waited_s)
        self._keep_figures(import_s=slowest.import_s, waited_s=slowest.waited_s)
        assert self._environment is not None
        text = f"imports took {slowest.import_s:.1f} s, of this {slowest.waited_s:.1f} s in wait for files"
        if not self._figures.pays:
            self._note(f"the environment is not copied to the nodes: {text}")
            return
        self._note(f"copying the environment to the nodes for later starts: {text}")
        most = None if self._figures.copied_s else int((self._figures.waited_s or 0.0) * limits().copied_bytes_per_s)
        self._in_thread([self._environment], is_awaited=False, most_bytes=most)

    def _summarize(self, hosts: Collection[str]) -> None:
        """Report what was copied, and how long that took."""
        copied = {host: self._copied[host] for host in hosts if host in self._copied}
        if not copied or not self._packages:
            return
        took_s = max(message.took_s for message in copied.values())
        if took_s and self._environment is not None and any(each.program for each in self._packages.values()):
            self._keep_figures(copied_s=took_s)
        without = sum(bool(message.problems) for message in copied.values())
        names = ", ".join(f"{each.source} ({fsio.size_text(each.bytes)})" for each in self._packages.values())
        text = f"nodes with a copy: {len(copied) - without} of {len(copied)}, "
        text += f"made within {took_s:.1f} s" if took_s else "all from an earlier start"
        self._note(f"{names}: {text}", is_problem=bool(without))

    def _note(self, text: str, *, is_problem: bool = False) -> None:
        (log.warning if is_problem else log.info)("%s", text)
        self._tell(text)
