"""What a run saves, when and how: by steps, by time or after the best evaluation, in the background or not.

A checkpoint holds the strategy's state, the loader's position, and what ties it to its run (:class:`TrainingState`).
Rank 0's clock decides when a save by time is due, and the ranks then agree on the step.
"""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.base import logs
from toolkit.base.errors import CheckpointError, ConfigError, UnsavableStateError, listing
from toolkit.checkpoint.exchange import ReplicaSums
from toolkit.checkpoint.folder import CheckpointFolder, Keep
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.reader import Loaded
from toolkit.checkpoint.writer import BackgroundSave, CuttableClient, Staging, save
from toolkit.config import FIXED_ON_RESUME, CheckpointConfig, JobConfig, value_of
from toolkit.data.loader import Batches
from toolkit.devices import accelerator
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import TRACE_VARIABLE, RunDir
from toolkit.ranks import older_torch
from toolkit.ranks.collectives import gather_rows
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json, PerRank, State
from toolkit.strategies.protocol import LoadsByManifest, RoundBased
from toolkit.train import rank_components

#: A save that must be made is retried for this long. The grace that a site grants is mostly shorter.
PATIENCE_S = 300.0
RETRY_EVERY_S = 1.0

log = logs.get(__name__)


class Saver:
    """One rank's saves of ``state``. Every rank makes the same calls."""

    def __init__(self, config: CheckpointConfig, session: Session, state: TrainingState) -> None:
        self._session, self._state = session, state
        self._config = config
        self._asked = saves_asked()
        self.timer = SaveTimer(config, session)
        self._blocked_s = 0.0
        self.on_disk = CheckpointFolder(
            RunDir(session.run_dir).checkpoints,
            Keep(config.keep, config.keep_every, config.keep_best),
            is_ours=session.owns_run,
            on_progress=self._note_progress,
        )
        self.second = rank_components.checkpoint_mirror(config.copy_to, session, self.on_disk)
        # Saves in the background: the buffers, the thread's store client, and the save in progress.
        self._background = config.background
        self._staging = Staging()
        self._client: CuttableClient | None = None
        self._writing: BackgroundSave | None = None
        self._waits = True  #: the training waits for what is being written or read
        self._write_files: Callable[[Path], None] | None = None
        self.newest: int | None = None  #: the step of the newest checkpoint
        self._has_saved = False  #: in this attempt
        self._failed: list[str] = []  #: since the last good save
        #: The best figure with which a save was begun, and with which one was committed; see :meth:`is_best`.
        self._best_begun = self._best_committed = state.best
        self.save_s = 0.0  #: how long the last save took

    def include_files(self, write_files: Callable[[Path], None]) -> None:
        """Have a library write its own checkpoint in each save: ``write_files(folder)``, on every rank.

        Such saves are never made in the background. A save that fails ends the attempt, because other ranks may be
        waiting for this one inside the library.
        """
        self._write_files, self._background = write_files, False

    def is_due(self, step: int) -> bool:
        """True if the run is to be saved after ``step`` steps."""
        intervals = (self._config.every_steps, self.on_disk.keep.every)
        return step in self._asked or any(isinstance(every, int) and step % every == 0 for every in intervals)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """True if a save is due because no earlier evaluation was as good as ``metrics``, equal on all ranks."""
        keep = self.on_disk.keep
        if keep.best is None:
            return False
        figure = keep.score(metrics)
        # A metric that is missing or no number saves nothing, and does not end the training.
        if figure is None:
            log.warning("checkpoint.keep_best: there is no number %s, only %s", keep.best, ", ".join(sorted(metrics)))
        if figure is None or (self._state.best is not None and figure <= self._state.best):
            return False
        self._state.best = figure
        return True

    def set_timer(self) -> None:
        """Start the time to the next save by time. Called after a save, or where there is none to make."""
        self.timer.set(self._blocked_s, self.save_s)

    def note_evaluation(self, step: int, reached: Mapping[str, Json]) -> None:
        """Note in the checkpoint of ``step`` what an evaluation of its state has found. Every rank calls it."""
        self._best_begun, failed = self._state.best, 0.0
        if self._session.is_main:
            try:
                self.on_disk.replace_meta(step, {**self._state.meta, **reached})
            except CheckpointError as error:
                log.warning("the evaluation of step %d is not noted in its checkpoint: %s", step, error)
                failed = 1.0
        # All ranks must know the same best figure: they decide by it whether to save.
        if self._state.source.sum({"failed": failed})["failed"]:
            self._forget_best()
        else:
            self._best_committed = self._best_begun

    def leave_out(self) -> None:
        """Note that a due save is not made. It may have been that of the best state so far."""
        self._state.best = self._best_begun
        self.set_timer()

    def save(self, step: int, reached: Mapping[str, Json], *, must: bool = False) -> None:
        """Commit the state after ``step`` steps. Every rank calls it, and the outcome is the same on all.

        ``reached`` is what the loop wants to find again at a resume. A save that fails is logged, and the training
        continues, because a full disk must not end it. With ``must`` (nothing comes after this save) it is retried for
        ``PATIENCE_S``, and then raises CheckpointError.

        The training waits for the first save of an attempt. With ``checkpoint.background`` later ones are written in
        the background, one at a time, unless they ``must`` be made. Raises UnsavableStateError where no later save
        would succeed either, such as for replicas that have drifted apart; if the save before this one, in the
        background, has found it, at this one.
        """
        started = time.monotonic()
        self.await_save()  # one save at a time
        self._best_begun = self._state.best
        if self._background and self._has_saved and not must:
            # It writes a copy, because the next step changes the weights.
            state = self._state.now()
            # Rank 0 compares with what it writes, so its training need not wait for sums.
            replicas = None if self._session.is_main else ReplicaSums(state)
            staged, wait_for_copy = self._staging.copy(state, self._session.rank)
            meta = {**self._state.meta, **reached}
            # A store client serves one call at a time, so the writing thread gets one of its own.
            if self._client is None and self._session.store is not None:
                self._client = CuttableClient(older_torch.clone(self._session.store))

            def write() -> Path:
                wait_for_copy()
                return self._write(step, staged, meta, self._client, replicas)

            self._waits = False
            self._writing = BackgroundSave(step, self._client, write, self._note_failure)
        else:
            self._save_now(step, reached, must)
        self._blocked_s = time.monotonic() - started
        if not must:
            self.set_timer()

    def _save_now(self, step: int, reached: Mapping[str, Json], must: bool) -> None:
        deadline = time.monotonic() + (PATIENCE_S if must else 0.0)
        while True:
            try:
                state, meta = self._state.now(), {**self._state.meta, **reached}
                if self._background and not must:
                    self._staging.allocate(state, self._session.rank)
                self._write(step, state, meta, self._session.store)
                self._succeed(step)
                return
            except CheckpointError as error:
                # Other ranks may wait inside the library, so the attempt cannot continue. Nor does it where all later
                # saves would fail, too: it would train on without checkpoints.
                if self._write_files is not None or isinstance(error, UnsavableStateError):
                    raise
                self._note_failure(step, error)
                if not must:
                    self._forget_best()
                    return
                # All ranks give up together. Their clocks differ, and a rank that gave up alone would leave the others
                # waiting in the next save.
                if self._state.source.sum({"votes": float(time.monotonic() >= deadline)})["votes"]:
                    raise
                time.sleep(RETRY_EVERY_S)
                self._session.activity.note_progress()  # a full disk is waited for and is no hang

    def await_save(self, wanted: int | None = None) -> None:
        """Wait for the save that is being written, if any. With ``wanted``, cancel it unless it is of that step."""
        writing, self._waits = self._writing, True
        if writing is None:
            return
        # A stop, and the end of a loop, save a later step anyway; a stop has only seconds for it.
        writing.is_cancelled = wanted is not None and writing.step != wanted
        writing.wait()
        self._writing = None
        if isinstance(writing.error, UnsavableStateError):  # on all ranks
            raise writing.error
        if writing.error is None:
            self._succeed(writing.step)
        else:
            self._forget_best()

    @property
    def failure(self) -> str | None:
        """A text on the saves that failed since the last good one, or None. It has the last error."""
        count = f"{len(self._failed)} saves" if len(self._failed) > 1 else "save"
        return f"the last {count} failed: {self._failed[-1]}" if self._failed else None

    def note_newest_on_disk(self, newest: int | None) -> None:
        """Note the step of the run's newest checkpoint, if any."""
        self.newest = newest
        self._best_begun = self._best_committed = self._state.best
        # The attempt before may have ended while this checkpoint was being copied.
        if self.second is not None and newest is not None:
            self.second.copy(self.on_disk.path(newest))

    def wait_for_mirror(self) -> None:
        """Wait for the copies to the second place. Called at the end of a training, after the last save."""
        if self.second is not None:
            self.second.wait()

    def close(self) -> None:
        """Give up what is still being written."""
        self.timer.cancel()
        if self._writing is not None:
            self._writing.abandon()

    def _write(
        self, step: int, state: State, meta: Mapping[str, Json], kv: Any, replicas: ReplicaSums | None = None
    ) -> Path:
        started, session = time.monotonic(), self._session
        path = save(
            self.on_disk,
            step,
            state,
            meta,
            rank=session.rank,
            world_size=session.world_size,
            kv=kv,
            attempt=session.attempt,
            replicas=replicas,
            write_files=self._write_files,
        )
        self.save_s = time.monotonic() - started
        log.info("saved %s in %.2f s", path, self.save_s)
        return path

    def _note_progress(self) -> None:
        """Note that a piece of a file was written or read. If the training waits for it, that counts as progress."""
        writing = self._writing  # its thread ends a save that was cancelled, between two pieces
        if writing is not None and writing.in_save_thread:
            writing.refuse_if_cancelled()
        if self._waits:
            self._session.activity.note_progress()

    def _succeed(self, step: int) -> None:
        self.newest, self._has_saved, self._best_committed = step, True, self._best_begun
        if self.second is not None:
            self.second.copy(self.on_disk.path(step))
        if self._failed:
            log.warning("saves that had failed before it: %d, the last one: %s", len(self._failed), self._failed[-1])
            self._failed.clear()

    def _note_failure(self, step: int, error: CheckpointError) -> None:
        self._failed.append(str(error))
        log.error("step %d is not saved; the last checkpoint is kept: %s", step, error)

    def _forget_best(self) -> None:
        # The best state so far is in no checkpoint. One that is worse, and better than those that are, must be saved.
        if self._state.best == self._best_begun:
            self._state.best = self._best_committed
        self._best_begun = self._best_committed


#: The kind of request by which the ranks agree on the step of a save by time.
SAVE = "save"


class SaveTimer:
    """Asks the ranks for a save by time. Only rank 0's clock counts: on the others nothing happens."""

    def __init__(self, config: CheckpointConfig, session: Session) -> None:
        self._config, self._session = config, session
        self._timer: threading.Timer | None = None
        self._due_s = 0.0  #: when the timer fires, by ``time.monotonic``

    def set(self, blocked_s: float, save_s: float) -> None:
        """Start the time to the next save. The training waited ``blocked_s`` for the last, which took ``save_s``."""
        if not self._session.is_main:
            return
        self.cancel()
        # ``every_min`` and ``every_steps: auto`` may both be set: the shorter wait counts.
        waits = [60.0 * self._config.every_min] if self._config.every_min is not None else []
        if self._config.every_steps == "auto":
            try:
                attempts = RunDir(self._session.run_dir).attempts()
            except OSError:  # the disk is away: as in a run's first attempt
                attempts = []
            waits.append(interval_s(blocked_s, save_s, between_failures_s(attempts)))
        if waits:
            self._due_s = time.monotonic() + min(waits)
            self._start()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Put off the timer's request for the block.

        The gate hands out one request after the other: a save that waits for the end of an evaluation would keep a stop
        from cutting it short.
        """
        timer = self._timer
        if timer is not None:
            timer.cancel()
        try:
            yield
        finally:  # a block that fails may be a stop, before which the saves continue
            if timer is not None and timer is self._timer:  # else it has fired just then
                self._start()

    def cancel(self) -> None:
        """Ask for nothing from here on."""
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        wait_s = max(0.0, self._due_s - time.monotonic())
        self._timer = threading.Timer(wait_s, self._ask)
        self._timer.daemon = True
        self._timer.start()

    def _ask(self) -> None:
        self._timer = None
        self._session.gate.request(SAVE)


#: Presumed before a run has failed: one failure a day and run, which large clusters see with some hundred GPUs.
PRESUMED_S = 86_400.0
MAX_OVERHEAD = 0.01
SHORTEST_S = 10.0
FAILURES = ("crashed", "hang", "out_of_memory", "node_failure")


def interval_s(blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Return the seconds from one save to the next.

    Young (1974) and Daly (2006): where a save costs C and failures come every M on average, the least time is lost by
    saving every sqrt(2 C M). C is the time that the training waits. Saving takes at most 1 % of the time. Writing in
    the background costs nothing, but must be done before the next save begins.
    """
    best = math.sqrt(2 * blocked_s * between_failures_s)
    return max(best, blocked_s / MAX_OVERHEAD, 2 * written_s, SHORTEST_S)


def between_failures_s(attempts: Sequence[AttemptRecord]) -> float:
    """Return the mean seconds between failures of the attempts. One failure, after a day, is presumed before them."""
    # A clock that was set back would give an attempt less than no time.
    seconds = sum(max(0.0, attempt.ended - attempt.started) for attempt in attempts)
    return (PRESUMED_S + seconds) / (1 + sum(attempt.cause in FAILURES for attempt in attempts))


MESH = "strategy.mesh"
#: Key in a checkpoint's identity: the data set that the order of samples belongs to.
DATA = "the data set"


def identity(config: JobConfig) -> dict[str, Json]:
    """Return the values that tie a checkpoint to its run (``FIXED_ON_RESUME``), and the mesh, which may change."""
    mesh = {name: size for name, size in asdict(config.strategy.mesh).items() if size is not None}
    return {**{key: value_of(config, key) for key in FIXED_ON_RESUME}, MESH: mesh}


def saves_asked() -> Collection[int]:
    """Return the steps after which a run is to be saved besides what its config says, by the brief for a trace."""
    return frozenset(json.loads(os.environ.get(TRACE_VARIABLE, "{}")).get("saves", ()))


def resume_environment(session: Session) -> dict[str, Json]:
    """Return what a resume needs, besides the run's identity, to reproduce every bit."""
    if session.device.type != "cpu":
        processor = accelerator.name_of(session.device)
    else:
        try:
            lines = Path("/proc/cpuinfo").read_text().split("\n")
            names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
            processor = names[0] if names else platform.machine()
        except OSError:
            processor = platform.processor()
    return {
        "world size": session.world_size,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor,
    }


class Checkpointed(Protocol):
    """What checkpoints need of a :class:`~toolkit.strategies.protocol.Strategy`, or of a user's own loop."""

    def state(self) -> State: ...

    def on_loaded(self, values: Mapping[str, Json]) -> None: ...

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]: ...


class TrainingState:
    """What one rank saves and restores. Every rank makes the same calls."""

    def __init__(
        self, session: Session, source: Checkpointed, identity: Mapping[str, Json], best_by: str | None = None
    ) -> None:
        self._session = session
        self.source = source  #: the strategy, or the objects of a user's own loop
        self._loader: Batches | None = None
        self._position = f"data/rank{session.rank}"
        self.identity: dict[str, Json] = dict(identity)
        self._best_by = best_by  #: the ``keep_best`` metric
        self.best: float | None = None  #: the best figure so far of that metric; higher is better
        self._conditions = resume_environment(session)

    @property
    def meta(self) -> dict[str, Json]:
        """Return what rank 0 writes down in each checkpoint about the run."""
        return {"identity": self.identity, "conditions": self._conditions, "best": self.best, "best_by": self._best_by}

    def include(self, loader: Batches) -> None:
        """Save the position of ``loader`` with the strategy's state, and restore it at a resume.

        Raises ConfigError on all ranks where their data sets differ.
        """
        self._loader = loader
        data = loader.fingerprint()
        if data is None:
            return
        self.identity = {**self.identity, DATA: data}
        if self._session.world_size == 1 or not dist.is_initialized():
            return
        # A rank with fewer samples would later leave the others waiting. A folder that is listed while files arrive, or
        # a stale copy on a node's own disk, gives ranks different sets. What most ranks have is taken for right.
        size = int(data.split()[0])  # a fingerprint begins with the number of samples
        row = torch.tensor([size, zlib.crc32(data.encode())], dtype=torch.int64, device=self._session.device)
        rows = [(int(samples), int(crc)) for samples, crc in gather_rows(row).tolist()]
        usual = Counter(rows).most_common(1)[0][0]
        others: list[str] = []
        for rank, (samples, crc) in enumerate(rows):
            if (samples, crc) != usual:
                but = ", but others" if samples == usual[0] else ""
                others.append(f"rank {rank} has {samples} samples{but}")
        if others:
            raise ConfigError(
                f"data: the ranks have different data sets: {listing(others, 8)}; most ranks have {usual[0]} samples. "
                "See that all nodes have the same files (data.root), that none is being written, and that the job's "
                "order, if it has one, is the same on each rank; then start again"
            )

    def now(self) -> State:
        """Return the state as it is, of live tensors."""
        return {**self.source.state(), **self._place_of_loader()}

    def _place_of_loader(self) -> State:
        """Return the loader's position, if it is this rank's own."""
        position = None if self._loader is None else self._loader.state()
        return {} if position is None else {self._position: PerRank(position)}

    def places(self) -> State | Callable[[Manifest], State]:
        """Return what is to be filled from a checkpoint, or a function of the checkpoint's manifest that does."""
        source = self.source
        if not isinstance(source, LoadsByManifest | RoundBased):
            return self.now()

        def found(manifest: Manifest) -> State:
            if isinstance(source, LoadsByManifest):
                places = source.places(manifest)
            else:
                places = source.prepare_load(manifest.step, [*manifest.tensors, *manifest.values])
            return {**places, **self._place_of_loader()}

        return found

    def restore(self, loaded: Loaded) -> None:
        """Hand over what was loaded besides the tensors, and restore the loader's position."""
        self.source.on_loaded({**loaded.values, "step": loaded.step})
        if self._loader is not None and self._position in loaded.values:
            self._loader.restore(loaded.values[self._position])
        self.restore_best(loaded.meta)

    def restore_best(self, meta: Mapping[str, Json]) -> None:
        """Take over the best figure in a checkpoint's ``meta``, if of the same metric."""
        best = meta.get("best")
        # A figure of another metric would keep every worse state from being saved as the best.
        is_same = meta.get("best_by", self._best_by) == self._best_by
        self.best = float(best) if is_same and isinstance(best, (int, float)) else None
