"""Other places that a run can go on from, which plugins bring: what the loop asks of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.reader import Loaded
from toolkit.ranks.state import Json


class StateCopies(Protocol):
    """Copies of the state that are made between checkpoints, and are newer than these at a restart.

    The hook ``state_copies`` makes them of ``checkpoint.memory_every_steps``, the session and the training's state.
    """

    def load(self, newest_on_disk: Callable[[], int | None]) -> Loaded | None:
        """Load the newest copy, on every rank, before a training starts. None: none is newer than what is on disk.

        Only rank 0 calls ``newest_on_disk``. Raises CorruptCheckpointError on all ranks where a copy was damaged: what
        was filled by then must be filled again from a checkpoint.
        """

    def is_due(self, step: int) -> bool:
        """True if the state is to be copied after ``step`` steps. The loop asks after each step."""

    def keep(self, step: int, reached: Mapping[str, Json], began_s: float) -> None:
        """Copy the state after ``step`` steps; every rank calls it.

        ``began_s``: when the training began to wait for the copy, by ``time.monotonic``.
        """

    def close(self) -> None:
        """Wait until the last copy is complete on this node."""


class CheckpointCopies(Protocol):
    """Rank 0's copies of committed checkpoints in another folder; no step and no save waits for one.

    The hook ``second_place`` makes them of that folder, what is to be kept, a call to make each second while the
    training waits, and one that tells whether the run is still this job's.
    """

    checkpoints: CheckpointFolder

    def copy(self, path: Path) -> None:
        """Have the committed checkpoint ``path`` copied."""

    def fetch(self, home: CheckpointFolder, damaged: Collection[str] = ()) -> Path | None:
        """Copy back the newest good checkpoint if ``home`` has no good one as new; ``damaged`` names bad ones there.

        Return its path at ``home``, or None. It is called before a training starts.
        """

    def wait(self) -> None:
        """Wait until all is copied, at the end of a run."""
