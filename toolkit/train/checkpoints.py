"""The run's checkpoints as a training loop sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from toolkit import registry
from toolkit.checkpoint.copies import StateCopies
from toolkit.checkpoint.folder import step_of
from toolkit.checkpoint.manifest import CorruptCheckpointError
from toolkit.checkpoint.reader import Loaded, load
from toolkit.config import CheckpointConfig
from toolkit.data.loader import Batches
from toolkit.hang import activity
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.train.resume import log_what_differs, refuse_another_run
from toolkit.train.saver import Saver
from toolkit.train.state import Checkpointed, TrainingState


class Checkpoints:
    """Resumes once from the newest good checkpoint. Its ``saver`` saves from then on, and its ``copies`` in memory."""

    def __init__(
        self, config: CheckpointConfig, session: Session, strategy: Checkpointed, identity: Mapping[str, Json]
    ) -> None:
        self._session = session
        self._state = TrainingState(session, strategy, identity, config.keep_best)
        self.saver = Saver(config, session, self._state)
        self.copies: StateCopies | None = None
        if config.memory_every_steps is not None:
            make = registry.needed("state_copies", "checkpoint.memory_every_steps")
            self.copies = make(config.memory_every_steps, session, self._state)

    def include(self, loader: Batches) -> None:
        """Save and restore the position of ``loader``, too; see :meth:`TrainingState.include`."""
        self._state.include(loader)

    def resume(self) -> Loaded | None:
        """Fill the strategy from the newest good checkpoint and return it. None: there is none.

        Raises ConfigError when the config is another run's, CheckpointError when no checkpoint can be read.
        """
        self._session.activity.phase = activity.LOADING
        checkpoints = self.saver.checkpoints
        # A copy in memory, newer than what is whole on disk, is there only after a restart inside the job.
        loaded = damage = None
        try:
            if self.copies is not None:
                loaded = self.copies.load(checkpoints.newest_whole)
        except CorruptCheckpointError as error:
            damage = error
        is_on_disk = loaded is None
        if loaded is None:
            loaded = self._load()
            if loaded is None and damage is not None:  # the next attempt begins with weights that nothing has touched
                raise damage
        elif self._session.is_main:
            checkpoints.sweep()
            # What is on disk of a later step is damaged, and must not pass for the save of that step.
            for path in checkpoints.list():
                if step_of(path) >= loaded.step:
                    checkpoints.reject(path, "it is damaged, and the run goes on from an earlier step in memory")
        self.saver.set_timer()
        if loaded is None:
            return None
        self._state.restore(loaded)
        newest: int | None = loaded.step
        if not is_on_disk:
            # The restart may have cut off the save of the best state: what is on disk counts, as rank 0 sees it.
            on_disk = self._session.from_main("on disk", self._on_disk)
            self._state.restore_best(on_disk["meta"])
            newest = on_disk["newest"]
        if self._session.is_main:
            log_what_differs(loaded.meta, self._state.meta)
        self.saver.resume_from(newest)
        return loaded

    def _on_disk(self) -> dict[str, Json]:
        """Return the newest checkpoint's step, and its best figure."""
        manifests = map(self.saver.checkpoints.valid, self.saver.checkpoints.list())
        newest = next((manifest for manifest in manifests if manifest is not None), None)
        if newest is None:
            return {"newest": None, "meta": {}}
        return {"newest": newest.step, "meta": {k: v for k, v in newest.meta.items() if k.startswith("best")}}

    def roll_back(self, step: int, newest: int) -> int | None:
        """Fill the strategy from the newest good checkpoint up to step ``newest``.

        Returns that checkpoint's step, or None if there is none. Every rank calls it after ``step`` steps. The run goes
        on from ``step``, and loaders keep their position.
        """
        self.saver.await_save()
        loaded = self._read(newest)
        if loaded is None:
            return None
        self._state.source.loaded({**loaded.values, "step": step})
        return loaded.step

    def _load(self) -> Loaded | None:
        self._fetch(())  # rank 0 only; the other ranks wait in the load meanwhile
        refuse_another_run(self.saver.checkpoints, self._state, self._session.world_size)
        return self._read(None)

    def _fetch(self, damaged: Collection[str]) -> Path | None:
        second = self.saver.second
        return None if second is None else second.fetch(self.saver.checkpoints, damaged)

    def _read(self, newest: int | None) -> Loaded | None:
        session = self._session
        return load(
            self.saver.checkpoints,
            self._state.places(),
            rank=session.rank,
            world_size=session.world_size,
            kv=session.store,
            attempt=session.attempt,
            newest=newest,
            fetch=self._fetch,
        )

    def close(self) -> None:
        """Give up what is still being written. At the end of a complete training nothing is."""
        if self.copies is not None:
            self.copies.close()
        self.saver.close()
