"""A second place for a run's checkpoints, on another disk, which serves if the first disk loses them.

A thread of rank 0 copies what is committed. Every byte is checked against its digest before the copy is committed there
under the same protocol. No step and no save waits for it. A second disk that is full or away does not end the training:
its start and its end wait for one that gives no answer, but not for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from toolkit.base import fsio, logs, trust
from toolkit.base.errors import CheckpointError, RequestError
from toolkit.base.process_limits import limits
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.folder import CheckpointFolder, Keep, file_errors, step_of

log = logs.get(__name__)

T = TypeVar("T")

_CHUNK_BYTES = 1 << 24


class CheckpointMirror:
    """Rank 0's copier between the run's folder and the second place."""

    def __init__(
        self,
        folder: Path,
        keep: Keep,
        on_progress: Callable[[], None] = lambda: None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """Touch no file. ``on_progress`` is called every second while the training waits."""
        self.checkpoints = CheckpointFolder(folder, keep, is_ours=is_ours)
        self._on_progress = on_progress
        self._answered_s = 0.0  #: when a piece was last read or written, by ``time.monotonic``
        self._fetched: set[str] = set()
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def copy(self, path: Path) -> None:
        """Have the committed checkpoint ``path`` copied after the current one. Only the newest waiting counts."""
        with self._lock:
            self._waiting = path
            if self._thread is None:
                self._thread = _start(self._copy_all)

    def fetch(self, home: CheckpointFolder, damaged: Collection[str] = ()) -> Path | None:
        """Copy back the newest good checkpoint if ``home`` has no good one as new. Return its path there, or None.

        ``damaged`` names those at ``home`` whose bytes were found to be wrong; others count as good if their files have
        the right sizes. Call it before an attempt loads. A failure is logged, not raised.
        """
        back: list[Path] = []
        is_given_up = threading.Event()

        def note() -> None:
            # The training may have begun meanwhile: nothing may appear in its folder then.
            if is_given_up.is_set():
                raise CheckpointError("the training has begun without it")
            self._note()

        def fetch() -> None:
            try:
                self._refuse_of_others()
                self.checkpoints.remove_leftovers()
                valid = (home.valid_manifest(path) for path in home.list() if path.name not in damaged)
                newest = max((manifest.step for manifest in valid if manifest is not None), default=-1)
                there = [path for path in self.checkpoints.list() if step_of(path) > newest]
            except CheckpointError as error:
                log.error("%s cannot be used: %s", self.checkpoints.folder, error)
                return
            for path in there:
                # What came from here before is damaged again: it would be so for ever.
                if path.name in self._fetched or back:
                    continue
                self._fetched.add(path.name)
                try:
                    self.checkpoints.refuse_untrusted(path)
                    log.warning("%s is newer than anything good in %s: copied back", path, home.folder)
                    back.append(_copy(self.checkpoints, path, home, note))
                except CheckpointError as error:
                    log.error("%s cannot be used: %s", path, error)

        self._wait_for(_start(fetch))
        is_given_up.set()
        return back[0] if back else None

    def wait(self) -> None:
        """Wait until all is copied, at the end of a run."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._wait_for(thread)

    def _note(self) -> None:
        self._answered_s = time.monotonic()

    def _wait_for(self, thread: threading.Thread) -> None:
        self._note()
        while thread.is_alive():
            thread.join(1.0)
            self._on_progress()
            if time.monotonic() - self._answered_s > limits().mirror_s:
                log.error(
                    "%s has not answered for %.0f s, training continues without it: is its file server down?",
                    self.checkpoints.folder,
                    limits().mirror_s,
                )
                return

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
                    _copy(CheckpointFolder(path.parent), path, self.checkpoints, self._note)
            except CheckpointError as error:
                if _is_there(path):  # else it was pruned meanwhile: there is a newer one
                    log.error("%s has no copy in %s: %s", path, self.checkpoints.folder, error)
                continue
            try:
                self.checkpoints.prune()
            except CheckpointError as error:
                log.warning("%s: older copies cannot be removed: %s", self.checkpoints.folder, error)

    def _refuse_of_others(self) -> None:
        """Raise CheckpointError where another user may write, and so place a checkpoint for this run to load."""
        try:
            with file_errors("looking at", self.checkpoints.folder):
                trust.refuse_untrusted(self.checkpoints.folder, "checkpoint.copy_to")
        except RequestError as error:
            raise CheckpointError(str(error)) from error


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="second-place", daemon=True)
    thread.start()
    return thread


def _is_there(path: Path) -> bool:
    """True unless the path is known to be gone. A disk that is away raises OSError, which would end the thread."""
    try:
        return fsio.is_there(path)
    except OSError:
        return True


def _copy(source: CheckpointFolder, path: Path, target: CheckpointFolder, note: Callable[[], None]) -> Path:
    manifest = source.manifest(path)
    temporary = target.begin(manifest.step)
    try:
        for name in manifest.files:
            # A library's file may lie in folders of its own.
            with file_errors("creating", temporary / name):
                for folder in reversed(Path(name).parents[:-1]):
                    fsio.make_dir(temporary / folder, parents=0)
            target.write(temporary / name, _noting(_chunks(path / name), note))
        # Check what is on the second disk, not what was sent to it.
        manifests.check_parts(temporary, _noting(manifest.parts(), note))
        note()  # the last part may have taken long
        return target.commit(temporary, manifest)
    except BaseException:
        target.abandon(temporary)
        raise


def _noting(items: Iterable[T], note: Callable[[], None]) -> Iterator[T]:
    for item in items:
        note()
        yield item


def _chunks(path: Path) -> Iterator[memoryview]:
    with file_errors("reading", path), fsio.open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield memoryview(chunk)
