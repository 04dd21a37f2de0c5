"""One rank of a run whose loop is a library's: what all adapters share.

Only what is saved differs from a :class:`~toolkit.train.user_loop.TrainingRun`: each rank has the library write its own
checkpoint into the folder that becomes ours. There is no collective of ours between those of the library.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit import hang
from toolkit.base import logs, signals
from toolkit.base.errors import CheckpointError, ConfigError, StoppedError
from toolkit.ranks.session import open_beside
from toolkit.ranks.state import Json
from toolkit.train.loss_windows import with_prefix
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.start import join_once
from toolkit.train.user_loop import TrainingRun
from toolkit.train.user_state import UserState

log = logs.get(__name__)


class LibraryRun(TrainingRun):
    """One rank's side. Every rank makes the same calls in the same order."""

    def __init__(self, library: str, save: Callable[[Path], None]) -> None:
        """Find the newest whole checkpoint, and listen for stop signals from here on.

        ``save(folder)`` has the library write a checkpoint of the steps done into the new ``folder``, on every rank.
        """
        config = join_once(f"toolkit.plugins.integrations.{library}")
        gpus, each = config.cluster.gpus_per_node, config.cluster.tasks_per_gpu
        with ExitStack() as stack:
            session = stack.enter_context(open_beside(config.dist, gpus, each))
            if config.checkpoint.memory_every_steps is not None:
                raise ConfigError(
                    f"checkpoint.memory_every_steps: the state is in {library}'s own files, of which no copies are "
                    "kept in memory; leave it out, and set checkpoint.every_steps or every_min"
                )
            super().__init__(config, session)
            self._stack.callback(stack.pop_all().close)
        # The script has no ``with`` block around the training that could close the run.
        atexit.register(self.close)
        self._library = library
        self._trace = None
        self._values: dict[str, Tensor | float] = {}
        self._is_finished = False
        self._state = UserState({}, session.rank, session.world_size, session.device)
        self._is_checked = True  # the library saves, and there is no collective of ours between its own
        self._checkpoints = Checkpoints(config.checkpoint, session, self._state, {"kind": library})
        self._saver = self._checkpoints.saver

        def save_files(folder: Path) -> None:
            save(folder / library)
            if session.is_main and not (folder / library).exists():  # committed, it would be a checkpoint of nothing
                raise CheckpointError(f"{library} has written nothing to {folder / library}")

        self._saver.include_files(save_files)
        loaded = self._open()
        self.meta: Mapping[str, Any] = {} if loaded is None else loaded.meta  #: what :meth:`_saved_with` has saved
        #: The library's part of the newest whole checkpoint; None in a new run.
        self.checkpoint: Path | None = None if loaded is None else loaded.path / library

    # --------------------------------------------------------------------------------------------- for a callback

    def refuse_other_world(self, world_size: int) -> None:
        """Raise ConfigError where the library has another number of ranks than the launcher has started."""
        if world_size != self.world_size:
            raise ConfigError(
                f"{self._library} trains on {world_size} ranks, and the launcher has started {self.world_size}: start "
                "all ranks by `toolkit submit`, `toolkit exec`, srun or torchrun, and not by the library"
            )

    def begin(self, total: int | None) -> None:
        """Stop here if that is agreed. Call it before the first step. ``total`` is the run's steps, None if unknown."""
        self._total = total
        self._buckets.arrange()
        self._boundary()

    def step_made(self, samples: int = 0, values: Mapping[str, Any] | None = None, *, may_save: bool = True) -> None:
        """Count a step, and log if that is due. With ``may_save`` save or stop here if that is due.

        ``samples``: how many all ranks have trained on in it; 0 where that is not known. ``values`` are logged.
        """
        self._samples, self._wait_s, self._in_step = samples, 0.0, True
        self.log_all(values or {})
        if may_save:
            self._end_step()
        else:
            self._log_step()

    def checkpoint_if_due(self) -> None:
        """Save or stop here if that is due."""
        self._end_step()

    def note_progress(self) -> None:
        """Show a sign of life."""
        self._activity.note_progress()

    def seed(self, number: int) -> None:
        """Seed all random generators for a step. An epoch's beginning has the number -1 - epoch."""
        self._seed(number)

    def save_the_end(self) -> None:
        """Save after the last step, unless that has been done."""
        self._save_the_end()

    def finish(self) -> None:
        """Hand over the result. What the script does from here on is done again if it is killed."""
        self._is_finished = True
        self._session.gate.close()
        self._complete(self._mark_completed())

    # ---------------------------------------------------------------------------- what differs from a loop of one's own

    def resumable(self, **objects: Any) -> None:
        raise ConfigError(f"run.resumable: {self._library} saves its own state: take the call out")

    def log(self, **values: Tensor | float) -> None:
        """Log numbers by name, those of rank 0. They are written when that is due, outside of a step at once."""
        self._activity.note_progress()
        if self.rank == 0:
            # Not attached: a graph would keep the step's memory until the next write.
            detached = {tag: value.detach() if isinstance(value, Tensor) else value for tag, value in values.items()}
            self._values |= with_prefix(detached)
        if not self._in_step:
            self._write()

    def log_all(self, values: Mapping[str, Any]) -> None:
        """Log those of ``values`` that are single numbers."""
        numbers = {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        self.log(**numbers)

    def _write(self) -> None:
        means = {tag: float(value) for tag, value in self._values.items()}
        self._values = {}
        self._metrics |= means
        self._write_figures(means | self._figures())

    def _boundary(self) -> None:
        try:
            super()._boundary()
        except StoppedError as stopped:
            log.info("%s", stopped)
            self.close()
            signals.chain_to_previous()
            raise SystemExit(stopped.exit_code) from None
        self._activity.phase = hang.IN_STEP

    def _may_save(self, *, must: bool) -> bool:
        return True

    def _saved_with(self) -> dict[str, Json]:
        return self._position()
