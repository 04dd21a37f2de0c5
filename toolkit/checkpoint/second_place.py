"""A second place for a run's checkpoints: another disk, in case the first one loses them.

A thread of rank 0 copies what is committed. Every byte is checked against its digest before the copy is committed there
under the same protocol. No step and no save waits for it. A second disk that is full or away does not end the training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from toolkit import fsio, logs, trust
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.folder import CheckpointFolder, file_errors, step_of
from toolkit.checkpoint.policy import Keep
from toolkit.errors import CheckpointError, RequestError

log = logs.get(__name__)

_CHUNK_BYTES = 1 << 24


class SecondPlace:
    """Rank 0's copier between the run's folder and the second place."""

    def __init__(self, folder: Path, keep: Keep, on_progress: Callable[[], None] = lambda: None) -> None:
        """Set up, without touching a file. ``on_progress`` is called for each piece copied while someone waits."""
        self.checkpoints = CheckpointFolder(
            folder, keep, on_progress=lambda: on_progress() if self._is_awaited else None
        )
        self._is_awaited = False
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def copy(self, path: Path) -> None:
        """Have the committed checkpoint ``path`` copied after the current one. Only the newest waiting counts."""
        with self._lock:
            self._waiting = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._copy_all, name="second-place", daemon=True)
                self._thread.start()

    def fetch(self, home: CheckpointFolder) -> None:
        """Copy the newest checkpoint back if it is newer than all valid ones at ``home``.

        Call it before an attempt loads. A failure is logged, not raised.
        """
        self._is_awaited = True
        try:
            self._refuse_of_others()
            self.checkpoints.sweep()
            valid = (home.valid(path) for path in home.list())
            newest = max((manifest.step for manifest in valid if manifest is not None), default=-1)
            # The newest alone decides: if it is not newer than home's, no other is.
            for path in self.checkpoints.list()[:1]:
                if step_of(path) > newest:
                    self.checkpoints.refuse_of_others(path)
                    log.warning("%s is newer than anything in %s: copied back", path, home.folder)
                    _copy(self.checkpoints, path, home)
        except CheckpointError as error:
            log.error("%s is no help: %s", self.checkpoints.folder, error)
        finally:
            self._is_awaited = False

    def wait(self) -> None:
        """Wait until all is copied, at the end of a run."""
        self._is_awaited = True
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _copy_all(self) -> None:
        while True:
            with self._lock:
                path, self._waiting = self._waiting, None
                if path is None:
                    self._thread = None
                    return
            try:
                self._refuse_of_others()
                if not self.checkpoints.is_committed(step_of(path)):
                    with file_errors("creating", self.checkpoints.folder):
                        fsio.make_dir(self.checkpoints.folder)
                    _copy(CheckpointFolder(path.parent), path, self.checkpoints)
                    self.checkpoints.prune()
            except CheckpointError as error:
                if path.exists():  # else it was pruned meanwhile: there is a newer one
                    log.error("%s has no copy in %s: %s", path, self.checkpoints.folder, error)

    def _refuse_of_others(self) -> None:
        """Raise CheckpointError where another user may place a checkpoint, with right digests, for this run to load."""
        try:
            with file_errors("looking at", self.checkpoints.folder):
                trust.refuse_of_others(self.checkpoints.folder, "checkpoint.copy_to")
        except RequestError as error:
            raise CheckpointError(str(error)) from error


def _copy(source: CheckpointFolder, path: Path, target: CheckpointFolder) -> None:
    manifest = source.manifest(path)
    temporary = target.begin(manifest.step)
    try:
        for name in manifest.files:
            # A library's file may lie in folders of its own.
            with file_errors("creating", temporary / name):
                for folder in reversed(Path(name).parents[:-1]):
                    fsio.make_dir(temporary / folder, parents=0)
            target.write(temporary / name, _chunks(path / name))
            target.on_progress()
        # Check what is on the second disk, not what was sent to it.
        manifests.check_digests(temporary, manifest)
        target.commit(temporary, manifest)
    except BaseException:
        target.abandon(temporary)
        raise


def _chunks(path: Path) -> Iterator[memoryview]:
    with file_errors("reading", path), path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield memoryview(chunk)
