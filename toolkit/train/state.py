"""What a run saves beside the strategy's state, and what must be the same when it resumes."""

from __future__ import annotations

import os
import platform
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit import fsio, logs, trust
from toolkit.checkpoint import policy
from toolkit.checkpoint.background import Flight, Line, Staging
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.memory import KEY, Memory
from toolkit.checkpoint.policy import CopyClock, Keep
from toolkit.checkpoint.reader import Loaded, load
from toolkit.checkpoint.second_place import SecondPlace
from toolkit.checkpoint.store import CheckpointStore, newest_step
from toolkit.checkpoint.writer import save
from toolkit.config import FIXED_ON_RESUME, SAME_STATE, CheckpointConfig, JobConfig, goes_on_with, value_of
from toolkit.errors import CheckpointError, ConfigError, listing
from toolkit.hang import activity
from toolkit.ranks.collectives import gather_rows
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json, PerRank, State
from toolkit.rundir import RunDir
from toolkit.strategies.protocol import REPLICA, InRounds

#: A save that must be made is retried for this long. The grace that a site grants is mostly shorter.
PATIENCE_S = 300.0
RETRY_EVERY_S = 1.0
MESH = "strategy.mesh"
#: Key in a checkpoint's identity: the data set that the order of samples belongs to.
DATA = "the data set"
#: The kind of request by which the ranks agree on the step of a save by time.
SAVE = "save"

log = logs.get(__name__)


def identity(config: JobConfig) -> dict[str, Json]:
    """Return the values that tie a checkpoint to its run (``FIXED_ON_RESUME``), and the mesh, which may change."""
    mesh = {name: size for name, size in asdict(config.strategy.mesh).items() if size is not None}
    return {**{key: value_of(config, key) for key in FIXED_ON_RESUME}, MESH: mesh}


def refuse_other_identity(saved: Mapping[str, Json], current: Mapping[str, Json], where: Path) -> None:
    """Raise ConfigError, naming every key whose value differs from that in the checkpoint ``where``."""
    changed = [
        key for key in current if key in saved and key != MESH and not goes_on_with(key, saved[key], current[key])
    ]
    if changed:
        values = "; ".join(f"{key} was {saved[key]!r} and is now {current[key]!r}" for key in changed)
        raise ConfigError(
            f"{where} cannot be continued: {values}. Set {'them' if len(changed) > 1 else 'it'} back, "
            f"or start a new run with `toolkit submit` (from these weights: model.init_from={where})"
        )


def conditions(session: Session) -> dict[str, Json]:
    """Return what must stay the same, beside the run's identity, for a resume to reproduce every bit."""
    gpu = session.device.type == "cuda"
    return {
        "world size": session.world_size,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": torch.cuda.get_device_name(session.device) if gpu else _cpu_name(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


class Stateful(Protocol):
    """What a checkpoint needs of a loader: see :class:`toolkit.train.loop.Batches`."""

    def state(self) -> Json: ...

    def restore(self, state: Json) -> None: ...

    def fingerprint(self) -> str | None: ...


class Checkpointed(Protocol):
    """What checkpoints need of a :class:`~toolkit.strategies.protocol.Strategy`, or of a user's own loop."""

    def state(self) -> State: ...

    def loaded(self, values: Mapping[str, Json]) -> None: ...

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]: ...


@runtime_checkable
class Fitting(Protocol):
    """State whose places depend on what a checkpoint holds."""

    def places(self, manifest: Manifest) -> State:
        """Return what is to be filled from the checkpoint; no collective."""


class Checkpoints:
    """The run's checkpoints as the loop sees them: resume once, save when it is time."""

    def __init__(
        self, config: CheckpointConfig, session: Session, strategy: Checkpointed, identity: Mapping[str, Json]
    ) -> None:
        self._every_steps = config.every_steps
        self._every_min = config.every_min
        self._timer: threading.Timer | None = None
        self._blocked_s = 0.0
        self._store = CheckpointStore(
            RunDir(session.run_dir).checkpoints,
            Keep(config.keep, config.keep_every, config.keep_best),
            is_ours=session.owns_run,
            moved=self._moved,
        )
        # Only rank 0 copies checkpoints to the second place.
        self._copy_to = config.copy_to
        self._second: SecondPlace | None = None
        if config.copy_to is not None and session.is_main:
            place = trust.own_part(fsio.expand(config.copy_to))
            folder = place / session.run_dir.parent.name / session.run_dir.name
            self._second = SecondPlace(folder / "checkpoints", self._store.keep, session.activity.move)
        self._best: float | None = None  #: the best figure so far of the ``keep_best`` metric; higher is better
        # Saves in the background: the buffers, the thread's store client, and the save in progress.
        self._background = config.background
        self._staging = Staging()
        self._line: Line | None = None
        self._flight: Flight | None = None
        self._waits = True  #: the training waits for what is being written or read
        self._session = session
        self._strategy = strategy
        self._loader: Stateful | None = None
        self._write_files: Callable[[Path], None] | None = None
        self._position = f"data/rank{session.rank}"
        # Copies in memory.
        self._copy_clock: CopyClock | None = None  #: None: nothing is copied into memory
        self._memory: Memory | None = None
        self._is_sure_of_room = False
        if config.memory_every_steps is not None:
            self._copy_clock = CopyClock(config.memory_every_steps)
            self._memory = Memory.of_this_rank(session.rank, session.world_size, session.attempt, os.environ)
        self.newest: int | None = None  #: the step of the newest checkpoint
        self._has_saved = False  #: in this attempt
        self._failed: list[str] = []  #: since the last good save
        self.save_s = 0.0  #: how long the last save took
        self._meta: dict[str, Json] = {"identity": dict(identity), "conditions": conditions(session)}

    def include(self, loader: Stateful) -> None:
        """Save the position of ``loader`` with the strategy's state, and restore it at a resume.

        Every rank calls it. Raises ConfigError on all ranks where their data sets differ.
        """
        self._loader = loader
        data = loader.fingerprint()
        if data is not None:
            _refuse_different_data(self._session, data)
            self._meta["identity"] = {**_mapping(self._meta["identity"]), DATA: data}

    def include_files(self, write_files: Callable[[Path], None]) -> None:
        """Have a library write its own checkpoint in each save: ``write_files(folder)``, on every rank.

        Such saves are never made in the background. A save that fails ends the attempt, because other ranks may be
        waiting for this one inside the library.
        """
        self._write_files, self._background = write_files, False

    def _state(self) -> State:
        position = None if self._loader is None else self._loader.state()
        return {**self._strategy.state(), **({} if position is None else {self._position: PerRank(position)})}

    def due(self, step: int) -> bool:
        """True if the run is to be saved after ``step`` steps."""
        return any(step % every == 0 for every in (self._every_steps, self._store.keep.every) if isinstance(every, int))

    def is_due_in_memory(self, step: int) -> bool:
        """True if the state is to be kept in memory after ``step`` steps."""
        memory, clock = self._memory, self._copy_clock
        return memory is not None and memory.is_usable and clock is not None and clock.is_due(step)

    def keep_in_memory(self, step: int, reached: Mapping[str, Json], began_s: float) -> None:
        """Copy the state after ``step`` steps into the nodes' memory; every rank calls it. See :class:`Memory`.

        ``began_s``: when the training began to wait for the copy, by ``time.monotonic``. Where the copies do not fit it
        raises ConfigError; with ``auto`` it turns the copies off instead, on all ranks.
        """
        memory, clock = self._memory, self._copy_clock
        assert memory is not None
        assert clock is not None
        idle_s = memory.wait()
        state = self._state()
        shortage = None if self._is_sure_of_room else memory.shortage(state)
        if shortage is not None and not clock.is_auto:
            raise ConfigError(shortage)
        figures = clock.figures(step, began_s, memory.background_s)
        # Also a barrier: from here on the copy before this one is complete on all ranks and on their partners.
        sums = self._strategy.sum({**figures, "short": float(shortage is not None)})
        # One rank without room turns the copies off on all of them.
        if sums["short"]:
            log.warning("%s: auto is off: %s", KEY, shortage or "the copies do not fit into another node's memory")
            self._copy_clock = None
            return
        self._is_sure_of_room = True
        every = clock.agree(step, sums)
        if every is not None and self._session.is_main:
            log.info("the state is kept in memory every %d steps from here on", every)
        # Waits for the copy before and for new memory are left out of the cost by which ``auto`` sets the interval.
        idle_s += memory.write(step, state, {**self._meta, **reached, "best": self._best})
        now_s = time.monotonic()
        clock.copied(step, now_s - began_s - idle_s, now_s)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """True if the run is to be saved because no earlier evaluation was as good as ``metrics``.

        ``metrics`` are equal on all ranks.
        """
        keep = self._store.keep
        if keep.best is None:
            return False
        figure = keep.figure(metrics)
        # A metric that is missing or no number saves nothing, and does not end the training.
        if figure is None:
            log.warning("checkpoint.keep_best: there is no number %s, only %s", keep.best, ", ".join(sorted(metrics)))
        if figure is None or (self._best is not None and figure <= self._best):
            return False
        self._best = figure
        return True

    def _set_the_clock(self) -> None:
        """Start the timer for the next save by time.

        Only rank 0's clock counts. When it fires, the ranks agree on the step of the save (see ``SAVE``).
        """
        if not self._session.is_main:
            return
        if self._timer is not None:
            self._timer.cancel()
        # ``every_min`` and ``every_steps: auto`` may both be set: the shorter wait counts.
        waits = [60.0 * self._every_min] if self._every_min is not None else []
        if self._every_steps == "auto":
            attempts = RunDir(self._session.run_dir).attempts()
            waits.append(policy.interval_s(self._blocked_s, self.save_s, policy.between_failures_s(attempts)))
        if waits:
            self._timer = threading.Timer(min(waits), self._session.gate.request, [SAVE])
            self._timer.daemon = True
            self._timer.start()

    def save(self, step: int, reached: Mapping[str, Json], *, must: bool = False) -> None:
        """Commit the state after ``step`` steps. Every rank calls it, and the outcome is the same on all.

        ``reached`` is what the loop wants to find again at a resume. A save that fails is logged and made up for by the
        next one, because a full disk must not end a training. With ``must`` (nothing comes after this save) it is
        retried for ``PATIENCE_S``, and then raises CheckpointError.

        The training waits for the first save of an attempt, which proves that the replicas are equal. Later ones are
        written in the background, one at a time, unless they ``must`` be made.
        """
        started = time.monotonic()
        self.settle()  # one save at a time
        reached = {**reached, "best": self._best}
        if self._background and self._has_saved and not must:
            self._take_off(step, reached)
        else:
            self._save_now(step, reached, must)
        self._blocked_s = time.monotonic() - started
        if not must:
            self._set_the_clock()

    def _save_now(self, step: int, reached: Mapping[str, Json], must: bool) -> None:
        deadline = time.monotonic() + (PATIENCE_S if must else 0.0)
        while True:
            try:
                self._save(step, reached)
            except CheckpointError as error:
                self._fail(step, error)
                # Only a save that must be made is retried, and only until all ranks give up together.
                if must and self._agree_to_give_up(time.monotonic() >= deadline):
                    raise
                if not must:
                    return
                time.sleep(RETRY_EVERY_S)
                self._session.activity.move()  # a full disk is waited for and is no hang
            else:
                return

    def _agree_to_give_up(self, mine: bool) -> bool:
        """Return True if any rank votes to give up; a collective.

        The ranks' clocks differ, and a rank that gave up alone would leave the others waiting in the next save.
        """
        return bool(self._strategy.sum({"votes": float(mine)})["votes"])

    def _save(self, step: int, reached: Mapping[str, Json]) -> None:
        state = self._state()
        self._write(step, state, {**self._meta, **reached}, self._session.store, check_replicas=True)
        self._succeed(step)

    def _take_off(self, step: int, reached: Mapping[str, Json]) -> None:
        """Begin a save in the background. It writes a copy, because the next step changes the weights."""
        staged, wait_for_copy = self._staging.copy(self._state(), self._session.rank)
        meta = {**self._meta, **reached}
        # A store client serves one call at a time, so the writing thread gets one of its own.
        if self._line is None and self._session.store is not None:
            self._line = Line(self._session.store.clone())

        def write() -> Path:
            wait_for_copy()
            return self._write(step, staged, meta, self._line, check_replicas=False)

        self._waits = False
        self._flight = Flight(step, self._line, write)

    def postpone(self) -> None:
        """Leave out the save that is due, and start the timer for the next one."""
        self._set_the_clock()

    def settle(self, wanted: int | None = None) -> None:
        """Wait for the save that is being written, if any. With ``wanted``, cancel one of another step."""
        flight, self._waits = self._flight, True
        if flight is None:
            return
        # A stop, and the end of a loop, save a later step anyway; a stop has only seconds for it.
        flight.is_cancelled = wanted is not None and flight.step != wanted
        flight.land()
        self._flight = None
        if flight.error is None:
            self._succeed(flight.step)
        else:
            self._fail(flight.step, flight.error)

    def finish(self) -> None:
        """Wait for the copies to the second place. Called at the end of a training, after the last save."""
        if self._second is not None:
            self._second.wait()

    def close(self) -> None:
        """Give up what is still being written. After a training that has reached its end this is nothing."""
        if self._memory is not None:
            self._memory.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._flight is not None:
            self._flight.abandon()

    def _write(self, step: int, state: State, meta: Mapping[str, Json], kv: Any, *, check_replicas: bool) -> Path:
        started, session = time.monotonic(), self._session
        path = save(
            self._store,
            step,
            state,
            meta,
            rank=session.rank,
            world_size=session.world_size,
            kv=kv,
            attempt=session.attempt,
            check_replicas=check_replicas,
            lost=session.lost,
            write_files=self._write_files,
        )
        self.save_s = time.monotonic() - started
        log.info("saved %s in %.2f s", path, self.save_s)
        return path

    def _moved(self) -> None:
        """Note that a piece of a file was written or read. If the training waits for it, that counts as progress."""
        # The writing thread ends a save that was canceled, between two pieces.
        flight = self._flight
        if flight is not None and flight.is_here:
            flight.refuse_if_cancelled()
        if self._waits:
            self._session.activity.move()

    def _succeed(self, step: int) -> None:
        self.newest, self._has_saved = step, True
        if self._second is not None:
            self._second.copy(self._store.path(step))
        if self._failed:
            log.warning("saves that had failed before it: %d, the last one: %s", len(self._failed), self._failed[-1])
            self._failed.clear()

    def _fail(self, step: int, error: CheckpointError) -> None:
        # Other ranks may wait inside the library, so the attempt cannot go on.
        if self._write_files is not None:
            raise error
        self._failed.append(str(error))
        log.error("step %d is not saved, the last checkpoint stays: %s", step, error)

    def resume(self) -> Loaded | None:
        """Fill the strategy from the newest good checkpoint and return it; None if there is none.

        Raises ConfigError when the config is another run's, CheckpointError when no checkpoint can be read.
        """
        self._session.activity.phase = activity.LOADING
        # A copy in memory, newer than the disk, is there only after a restart inside the job.
        loaded = self._load_from_memory()
        is_on_disk = loaded is None
        if loaded is None:
            loaded = self._load()
        if loaded is not None and loaded.skipped and self._copy_to is not None:
            loaded = self._load()  # the damaged ones are set aside now, so their copies can be fetched
        self._set_the_clock()
        if loaded is None:
            return None
        # The tensors are in place; hand over the other values, then put the loader back to its position.
        self._strategy.loaded({**loaded.values, "step": loaded.step})
        if self._loader is not None and self._position in loaded.values:
            self._loader.restore(loaded.values[self._position])
        self._say_what_differs(loaded.meta)
        self._best = _number(loaded.meta.get("best"))
        self.newest = loaded.step if is_on_disk else newest_step(self._store.folder)
        # The attempt before may have ended while this checkpoint was being copied.
        if self._second is not None and is_on_disk:
            self._second.copy(loaded.path)
        return loaded

    def _load_from_memory(self) -> Loaded | None:
        """Load the copy kept before a restart inside the job. None: there is none newer than what is on disk."""
        if self._memory is None:
            return None
        loaded = self._memory.load(self._places(), self._session.store, newest_step(self._store.folder))
        if loaded is not None and self._session.is_main:
            self._store.sweep()
        return loaded

    def roll_back(self, step: int, newest: int) -> int | None:
        """Fill the strategy from the newest good checkpoint up to step ``newest``.

        Returns that checkpoint's step, or None if there is none. Every rank calls it after ``step`` steps. The run goes
        on from ``step``, and loaders keep their position.
        """
        self.settle()
        loaded = self._read(newest)
        if loaded is None:
            return None
        self._strategy.loaded({**loaded.values, "step": step})
        return loaded.step

    def _load(self) -> Loaded | None:
        if self._second is not None:  # rank 0 only; the other ranks wait in the load meanwhile
            self._second.fetch(self._store)
        self._refuse_another_run()
        return self._read(None)

    def _read(self, newest: int | None) -> Loaded | None:
        session = self._session
        return load(
            self._store,
            self._places(),
            rank=session.rank,
            world_size=session.world_size,
            kv=session.store,
            attempt=session.attempt,
            newest=newest,
        )

    def _places(self) -> State | Callable[[Manifest], State]:
        """Return what is to be filled from a checkpoint.

        It depends on the checkpoint for a strategy in rounds, whose state inside a round differs from that at its end.
        """
        strategy = self._strategy
        if isinstance(strategy, Fitting):
            return strategy.places
        state = self._state()
        if not isinstance(strategy, InRounds):
            return state

        def entered(manifest: Manifest) -> State:
            strategy.enter(manifest.step, [*manifest.tensors, *manifest.values])
            return self._state()

        return entered

    def _refuse_another_run(self) -> None:
        """Raise ConfigError, before anything is filled, where the newest readable checkpoint does not fit this run.

        Without this check another model would fail later, with a list of tensors that says less.
        """
        for path in self._store.list():
            manifest = self._manifest(path)
            if manifest is not None:
                refuse_other_identity(manifest.meta.get("identity", {}), _mapping(self._meta["identity"]), path)
                self._refuse_other_streams(manifest, path)
                self._refuse_inside_a_round(manifest, path)
                return

    def _refuse_other_streams(self, manifest: Manifest, path: Path) -> None:
        then, now = manifest.world_size, self._session.world_size
        if then != now and any(name.startswith("data/rank") for name in manifest.values):
            raise ConfigError(
                f"{path} cannot be continued on {now} ranks: each of {then} ranks had read its own stream, or its own "
                "part of the data (data.split), up to some point, and what is left cannot be shared out anew. Go on "
                f"with {then} ranks (cluster.nodes x cluster.tasks_per_node), or start a new run with `toolkit submit`"
            )

    def _refuse_inside_a_round(self, manifest: Manifest, path: Path) -> None:
        # Replicas that differ can go on only under the same strategy and on as many ranks.
        then, now = manifest.world_size, self._session.world_size
        if isinstance(self._strategy, InRounds):
            self._strategy.enter(manifest.step, [*manifest.tensors, *manifest.values])  # on every rank, or on none
        if not _is_inside_a_round(manifest) or (then == now and isinstance(self._strategy, InRounds)):
            return
        # Name a checkpoint at a round's end as a way out, if there is one.
        others = [other for other in self._store.list() if (m := self._manifest(other)) and not _is_inside_a_round(m)]
        way_out = f"or from {others[0].name}, which is at a round's end: move the newer ones away" if others else ""
        raise ConfigError(
            f"{path} was made inside a round of local_sgd, in which each of {then} ranks has weights of its own: only "
            f"local_sgd on {then} ranks (cluster.nodes x cluster.tasks_per_node) goes on from it. Go on with these"
            f"{', ' if way_out else ''}{way_out}; checkpoints every multiple of strategy.local_sgd.round_steps "
            "(checkpoint.every_steps) fit any number"
        )

    def _manifest(self, path: Path) -> Manifest | None:
        """Return the manifest; None for a damaged one, which the load will skip and report."""
        try:
            return self._store.manifest(path, sizes=False)
        except CheckpointError:
            return None

    def _say_what_differs(self, meta: Mapping[str, Json]) -> None:
        # None of these refuses a resume; they change only the last bits of the results.
        saved, now = _circumstances(meta), _circumstances(self._meta)
        changed = [f"{key} ({saved[key]} -> {now[key]})" for key in now if key in saved and saved[key] != now[key]]
        if changed and self._session.is_main:
            log.warning("from here on results equal those of an undisturbed run to rounding only, not bit for bit, "
                        "because of another %s", ", ".join(changed))  # fmt: skip


def _refuse_different_data(session: Session, data: str) -> None:
    """Raise ConfigError on all ranks where their data sets differ.

    Called before the first step: a rank with fewer samples would later leave the others waiting. A folder that is
    listed while files arrive, or a stale copy on a node's own disk, gives ranks different sets.
    """
    if session.world_size == 1 or not dist.is_initialized():
        return
    size = int(data.split()[0])  # a fingerprint begins with the number of samples
    # The ranks compare digests of the fingerprints; what most ranks have is taken for right.
    row = torch.tensor([size, zlib.crc32(data.encode())], dtype=torch.int64, device=session.device)
    rows = [(int(samples), int(crc)) for samples, crc in gather_rows(row).tolist()]
    usual = Counter(rows).most_common(1)[0][0]
    others = [
        f"rank {rank} has {found[0]} samples{', but others' if found[0] == usual[0] else ''}"
        for rank, found in enumerate(rows)
        if found != usual
    ]
    if others:
        raise ConfigError(
            f"data: the ranks have different data sets: {listing(others, 8)}; most ranks have {usual[0]} samples. See "
            "that all nodes have the same files (data.root), that none is being written, and that the job's order, if "
            "it has one, is the same on each rank; then start again"
        )


def _is_inside_a_round(manifest: Manifest) -> bool:
    return any(name.startswith(REPLICA) for name in manifest.tensors)


def _circumstances(meta: Mapping[str, Json]) -> dict[str, Json]:
    """Return the conditions that a save wrote down, with the strategy's name and the mesh."""
    known = _mapping(meta.get("identity", {}))
    mesh = {"mesh": known[MESH]} if MESH in known else {}
    return {**_mapping(meta.get("conditions", {})), "strategy": known.get("strategy.name", SAME_STATE[0]), **mesh}


def _number(value: Json) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _mapping(value: Json) -> Mapping[str, Json]:
    assert isinstance(value, Mapping)
    return value
