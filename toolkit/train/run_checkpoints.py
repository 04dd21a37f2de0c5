"""The run's checkpoints as a training loop sees them: whether it may resume from one, and what differs if it does."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from toolkit import hang
from toolkit.base import fsio, logs
from toolkit.base.errors import CheckpointError, ConfigError, listing
from toolkit.base.process_limits import limits
from toolkit.checkpoint.folder import CheckpointFolder, newest_step, step_of
from toolkit.checkpoint.manifest import CorruptCheckpointError, Manifest
from toolkit.checkpoint.reader import Loaded, load
from toolkit.config import CheckpointConfig, JobConfig, may_resume_with
from toolkit.data.loader import Loader
from toolkit.files import records
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import RunDir
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.strategies.protocol import REPLICA, RoundBased
from toolkit.train import rank_components
from toolkit.train.saver import MESH, Checkpointed, Saver, TrainingState

#: The ``kind`` in the identity of a run whose loop is the user's own.
USER_LOOP = "a loop of one's own"

log = logs.get(__name__)


class Checkpoints:
    """Resumes once from the newest good checkpoint. Its ``saver`` saves from then on, and its ``copies`` in memory."""

    def __init__(
        self, config: CheckpointConfig, session: Session, strategy: Checkpointed, identity: Mapping[str, Json]
    ) -> None:
        self._session = session
        self._state = TrainingState(session, strategy, identity, config.keep_best)
        self.saver = Saver(config, session, self._state)
        self._loaded: Loaded | None = None  #: at a resume, until the loop's loader is known
        self.copies = rank_components.copies_in_memory(config.memory_every_steps, session, self._state)

        self.include = self._state.include  #: saves and restores the position of a loader, too

    def use(self, loader: Loader) -> None:
        """Tie the checkpoints to the loader of a user's own loop. A collective.

        Raises ConfigError where the first one after a resume is not that of the checkpoint.
        """
        self._state.identity["global batch size"] = loader.global_batch_size
        self.include(loader)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            refuse_other_identity(_mapping(loaded.meta.get("identity", {})), self._state.identity, loaded.path)

    def resume(self) -> Loaded | None:
        """Fill the strategy from the newest good checkpoint and return it. None: there is none.

        Raises ConfigError when the config is another run's, CheckpointError when no checkpoint can be read.
        """
        self._session.activity.phase = hang.LOADING
        on_disk = self.saver.on_disk
        # A copy in memory, newer than what is whole on disk, is there only after a restart inside the job.
        loaded = damage = None
        try:
            if self.copies is not None:
                loaded = self.copies.load(on_disk.newest_whole)
        except CorruptCheckpointError as error:
            damage = error
        is_from_disk = loaded is None
        if loaded is None:
            self._fetch(())  # rank 0 only; the other ranks wait in the load meanwhile
            if self._session.is_main:
                self._await_saved()
            refuse_another_run(on_disk, self._state, self._session.world_size)
            loaded = self._read(None, self._refuse_lost)
            if loaded is None and damage is not None:  # the next attempt begins with weights that nothing has touched
                raise damage
        elif self._session.is_main:
            on_disk.remove_leftovers()
            # What is on disk of a later step is damaged, and must not pass for the save of that step.
            for path in on_disk.list():
                if step_of(path) >= loaded.step:
                    on_disk.reject(path, "it is damaged, and the run continues from an earlier step in memory")
        self.saver.set_timer()
        if loaded is None:
            return None
        self._state.restore(loaded)
        newest: int | None = loaded.step
        if not is_from_disk:
            # The restart may have cut off the save of the best state: what is on disk counts, as rank 0 sees it.
            found = self._session.from_main("on disk", self._newest_on_disk)
            self._state.restore_best(found["meta"])
            newest = found["newest"]
        if self._session.is_main:
            log_what_differs(loaded.meta, self._state.meta)
        self.saver.note_newest_on_disk(newest)
        self._loaded = loaded
        return loaded

    def _newest_on_disk(self) -> dict[str, Json]:
        """Return the newest checkpoint's step, and its best figure."""
        for manifest in map(self.saver.on_disk.valid_manifest, self.saver.on_disk.list()):
            if manifest is not None:
                best = {key: value for key, value in manifest.meta.items() if key.startswith("best")}
                return {"newest": manifest.step, "meta": best}
        return {"newest": None, "meta": {}}

    def roll_back(self, step: int, newest: int) -> int | None:
        """Fill the strategy from the newest good checkpoint up to step ``newest``.

        Returns that checkpoint's step, or None if there is none. Every rank calls it after ``step`` steps. The step
        stays ``step``, and loaders keep their position.
        """
        self.saver.await_save()
        loaded = self._read(newest)
        if loaded is None:
            return None
        self._state.source.on_loaded({**loaded.values, "step": step})
        return loaded.step

    def _fetch(self, damaged: Collection[str]) -> Path | None:
        second = self.saver.second
        return None if second is None else second.fetch(self.saver.on_disk, damaged)

    def _last_saved(self) -> AttemptRecord | None:
        """Return the last attempt that has left a checkpoint, by the run's own files."""
        attempts = RunDir(self._session.run_dir).attempts()
        return next((line for line in reversed(attempts) if line.step_saved is not None), None)

    def _await_saved(self) -> None:
        """Wait a while for checkpoints that were saved: a node may mount their file system late."""
        folder, deadline = self.saver.on_disk.folder, time.monotonic() + limits().late_mount_s
        while newest_step(folder) is None and self._last_saved() is not None and time.monotonic() < deadline:
            records.warn_once(f"{folder} has no checkpoint, but had one before: looking again")
            time.sleep(limits().retry_every_s)

    def _refuse_lost(self) -> None:
        """Raise CheckpointError where this run has saved checkpoints: it would begin anew without a word."""
        folder, saved = self.saver.on_disk.folder, self._last_saved()
        if saved is not None:
            aside = listing([path.name for path in fsio.entries(folder, "step-*.bad-*")])
            raise CheckpointError(
                f"{folder} has no checkpoint on {socket.gethostname()}"
                f"{aside and f' (damaged ones were moved aside: {aside})'}, and attempt {saved.attempt} left "
                f"one of step {saved.step_saved}: mount the file system there, or put the checkpoints back from a "
                "backup, and resume the run; to start from step 0, start a new run with `toolkit submit`"
            )

    def _read(self, newest: int | None, refuse_none: Callable[[], None] = lambda: None) -> Loaded | None:
        session = self._session
        return load(
            self.saver.on_disk,
            self._state.places(),
            rank=session.rank,
            world_size=session.world_size,
            kv=session.store,
            attempt=session.attempt,
            newest=newest,
            fetch=self._fetch,
            refuse_none=refuse_none,
        )

    def close(self) -> None:
        """Give up what is still being written."""
        if self.copies is not None:
            self.copies.close()
        self.saver.close()


def refuse_another_run(checkpoints: CheckpointFolder, state: TrainingState, world_size: int) -> None:
    """Raise ConfigError where the newest readable checkpoint does not fit this run. Nothing is filled yet.

    Without this check another model would fail later, with a list of tensors that says less.
    """
    for path in checkpoints.list():
        manifest = manifest_or_none(checkpoints, path)
        if manifest is None:
            continue
        refuse_other_identity(manifest.meta.get("identity", {}), state.identity, path)
        then = manifest.world_size
        if then != world_size and any(name.startswith("data/rank") for name in manifest.values):
            raise ConfigError(
                f"{path} cannot be continued on {world_size} ranks: each of {then} ranks had read its own stream, or "
                "its own part of the data (data.partition), up to some point, and the rest cannot be shared out again. "
                f"Continue with {then} ranks (cluster.nodes x cluster.tasks_per_node), or start a new run with "
                "`toolkit submit`"
            )
        _refuse_inside_a_round(checkpoints, state, manifest, path, world_size)
        return


def refuse_other_identity(saved: Mapping[str, Json], current: Mapping[str, Json], where: Path) -> None:
    """Raise ConfigError, naming every key whose value differs from that in the checkpoint ``where``."""
    changed = [
        key for key in current if key in saved and key != MESH and not may_resume_with(key, saved[key], current[key])
    ]
    if changed:
        values = "; ".join(f"{key} was {saved[key]!r} and is now {current[key]!r}" for key in changed)
        raise ConfigError(
            f"{where} cannot be continued: {values}. Set {'them' if len(changed) > 1 else 'it'} back, "
            f"or start a new run with `toolkit submit` (from these weights: model.init_from={where})"
        )


def _refuse_inside_a_round(
    checkpoints: CheckpointFolder, state: TrainingState, manifest: Manifest, path: Path, now: int
) -> None:
    # Replicas that differ can continue only under the same strategy and on as many ranks.
    then, strategy = manifest.world_size, state.source
    if isinstance(strategy, RoundBased):
        strategy.prepare_load(manifest.step, [*manifest.tensors, *manifest.values])  # on every rank, or on none
    if not _is_inside_a_round(manifest) or (then == now and isinstance(strategy, RoundBased)):
        return
    # Name a checkpoint at a round's end as a way out, if there is one.
    way_out = ""
    for other in checkpoints.list():
        readable = manifest_or_none(checkpoints, other)
        if readable is not None and not _is_inside_a_round(readable):
            way_out = f", or from {other.name}, which is at a round's end: move the newer ones away"
            break
    raise ConfigError(
        f"{path} was made inside a round of local_sgd, in which each of {then} ranks has weights of its own: only "
        f"local_sgd on {then} ranks (cluster.nodes x cluster.tasks_per_node) continues from it. Continue with these"
        f"{way_out}; checkpoints every multiple of strategy.local_sgd.round_steps "
        "(checkpoint.every_steps) fit any number"
    )


def manifest_or_none(checkpoints: CheckpointFolder, path: Path) -> Manifest | None:
    """Return the manifest; None for a damaged one, which a load will skip and report. Files' sizes are not checked."""
    try:
        return checkpoints.manifest(path, sizes=False)
    except CheckpointError:
        return None


def _is_inside_a_round(manifest: Manifest) -> bool:
    return any(name.startswith(REPLICA) for name in manifest.tensors)


def log_what_differs(saved: Mapping[str, Json], now: Mapping[str, Json]) -> None:
    """Warn about conditions in the meta data ``saved`` that differ from those in ``now``. None refuses a resume."""
    then, here = _circumstances(saved), _circumstances(now)
    others = [key for key in here if key in then and then[key] != here[key]]
    changed = [f"{key} ({then[key]} -> {here[key]})" for key in others]
    # Another number of ranks changes the batches of any loader but the toolkit's, which has a global batch size.
    identity = _mapping(saved.get("identity", {}))
    if "world size" in others and identity.get("kind") == USER_LOOP and "global batch size" not in identity:
        log.warning(
            "from here on results differ from those of an undisturbed run, because of another %s: each rank's loader "
            "has other batches, and the rest of this epoch may repeat or leave out samples; run.loader resumes exactly",
            ", ".join(changed),
        )
    elif changed:
        log.warning("from here on results equal those of an undisturbed run to rounding only, not bit for bit, "
                    "because of another %s", ", ".join(changed))  # fmt: skip


def _circumstances(meta: Mapping[str, Json]) -> dict[str, Json]:
    """Return the conditions that a save wrote down, with the strategy's name and the mesh."""
    identity = _mapping(meta.get("identity", {}))
    strategy = identity.get("strategy.name", JobConfig().strategy.name)
    mesh = {"mesh": identity[MESH]} if MESH in identity else {}
    return {**_mapping(meta.get("conditions", {})), "strategy": strategy, **mesh}


def _mapping(value: Json) -> Mapping[str, Json]:
    assert isinstance(value, Mapping)
    return value
