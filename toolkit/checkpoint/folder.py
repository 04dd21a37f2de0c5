"""The folder `checkpoints/` of a run. This module knows files, not tensors, and never imports torch.

    step-00000200/                 committed: renamed to this name after its manifest was on disk
    step-00000200.tmp-1a2b3c4d/    being written, or left over from a writer that died
    step-00000100.bad-5e6f7a8b/    found damaged and moved aside, so that its step can be saved again

Commit order (each step on disk before the next): rank files, manifest, folder, rename, parent folder. Older checkpoints
are removed only after that. If a process dies in between, the newest committed checkpoint stays loadable.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.base import fsio, logs, trust
from toolkit.base.errors import CheckpointError, ConfigError, RequestError
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.manifest import CorruptCheckpointError, Manifest
from toolkit.files.rundir import RunDir

log = logs.get(__name__)

_COMMITTED = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-\w+")
_FREE = "free space there (old runs: toolkit gc); a run that continues saves again automatically"
_ADVICE = {
    errno.ENOSPC: f"the disk is full: {_FREE}",
    errno.EDQUOT: f"the disk quota is used up: {_FREE}",
    errno.EROFS: "the file system is read-only: check its mount on this host, or move the run elsewhere",
    errno.EACCES: "this user may not write there: check who owns the run's folder",
    errno.EPERM: "this user may not write there: check who owns the run's folder",
    errno.ENOENT: "the folder has vanished: is the file system mounted here, has somebody removed the run?",
    errno.ESTALE: "the folder has vanished from the file server: has somebody removed or restored the run?",
    errno.EIO: "the disk or the file server failed: check this host's kernel log",
}


@contextmanager
def file_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names `path` and what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the file system there")
        raise CheckpointError(f"{doing} {path} failed ({error.strerror or error}); {advice}") from error


def step_of(path: Path) -> int:
    """Return the step in the name of a committed checkpoint."""
    match = _COMMITTED.fullmatch(path.name)
    assert match, path
    return int(match[1])


def saved_at(path: Path) -> float:
    """Return when rank 0 wrote its part. An evaluation after a resume writes the manifest again, and so the folder."""
    return next(iter(fsio.entries(path, "rank-00000.*")), path).stat().st_mtime


def is_name_of_committed(path: Path) -> bool:
    """True if this is the name of a committed checkpoint. It gets that name once its manifest is on disk."""
    return _COMMITTED.fullmatch(path.name) is not None


def _entries(folder: Path) -> list[Path]:
    """Return what is in `folder`; nothing where there is none. Raises CheckpointError where the disk does not say."""
    with file_errors("listing", folder):
        try:
            return list(folder.iterdir())
        except FileNotFoundError:
            if folder.is_symlink():  # its target may be a disk that is not mounted here
                raise
            return []


def committed(folder: Path) -> list[Path]:
    """Return the committed checkpoints in `folder`, newest first; none where there is no such folder.

    One whose manifest is gone counts: it got its name after its manifest was on disk, so it is damaged.
    """
    return sorted(filter(is_name_of_committed, _entries(folder)), key=step_of, reverse=True)


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest committed checkpoint in `folder`. It is for what only reports it.

    Where the folder cannot be listed that is logged, and None is returned.
    """
    try:
        return next(map(step_of, committed(folder)), None)
    except CheckpointError as error:
        log.warning("which step was saved is not known: %s", error)
        return None


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is committed.

    The ``newest`` N stay, those of every step that ``every`` divides, and the one that is ``best`` by a metric
    (``eval/accuracy``; ``-eval/loss``: the lowest).
    """

    newest: int = 2
    every: int | None = None
    best: str | None = None

    def __post_init__(self) -> None:
        if self.newest < 2:
            raise ConfigError(
                f"checkpoint.keep: {self.newest} is too few: with one checkpoint, damage to it loses the run; "
                "set it to 2 or more"
            )

    def steps(self, manifests: Sequence[Manifest]) -> set[int]:
        """Return the steps to keep of valid checkpoints, newest first.

        The newest with finite weights always stays, and the newest that a rollback may go back to.
        """
        steps = [manifest.step for manifest in manifests]
        finite = [manifest.step for manifest in manifests if manifest.meta.get("finite", True)]
        # Stops save inside a row of skipped steps, too; a rollback needs one from before the row.
        in_a_row = [(manifest.meta.get("skipped_steps") or {}).get("waits", False) for manifest in manifests]
        settled = [step for step, waits in zip(steps, in_a_row, strict=True) if not waits]
        stay = {*steps[: self.newest], *finite[:1], *settled[:1]}
        if self.every:
            stay |= {step for step in steps if step % self.every == 0}
        best = self.best_of(manifests)
        return stay if best is None else {*stay, best}

    def best_of(self, manifests: Iterable[Manifest]) -> int | None:
        """Return the step of the best one that was evaluated; None: none was. Of equals it is the oldest."""
        ranked: list[tuple[float, int]] = []
        for manifest in manifests:
            figure = self.score(manifest.meta.get("metrics") or {})
            # The metrics in a checkpoint whose own step was not evaluated are an earlier step's.
            if figure is not None and manifest.meta.get("evaluated") == manifest.step:
                ranked.append((-figure, manifest.step))
        return min(ranked)[1] if ranked else None

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the worth of a checkpoint, higher is better; None where the metric is missing or not a number."""
        value = None if self.best is None else metrics.get(self.best.removeprefix("-"))
        if not isinstance(value, (int, float)) or math.isnan(value):
            return None
        return -value if str(self.best).startswith("-") else value


class CheckpointFolder:
    """The checkpoints of one run. Rank 0 alone changes the folder; the other ranks write inside what rank 0 began."""

    def __init__(
        self,
        folder: Path,
        keep: Keep = Keep(),  # a value
        *,
        is_ours: Callable[[], bool] = lambda: True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Touch no file.

        ``is_ours`` is called before anything is written or removed, see ``RunDir.belongs_to``. ``on_progress`` is
        called for each piece of a file that was written to disk or read.
        """
        self.folder = folder
        self.keep = keep
        self._is_ours = is_ours
        self.on_progress = on_progress
        self._begun: set[Path] = set()
        self._figures: dict[Path, Manifest] = {}  #: of checkpoints found valid, without their tensors
        self._conversations = 0

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of `step` once it is committed."""
        return self.folder / f"step-{step:08d}"

    def named(self, name: str) -> Path:
        """Return the folder ``name`` that rank 0 sent: a checkpoint, or one being written.

        Raises CheckpointError for any other name. The name came through a store that anybody on the network may write,
        so it must not lead outside the folder.
        """
        if not (_COMMITTED.fullmatch(name) or _TEMPORARY.fullmatch(name)):
            raise CheckpointError(f"{name!r} is not a checkpoint's name in {self.folder}: rank 0 did not send this")
        return self.folder / name

    def list(self) -> Sequence[Path]:
        """Return the committed checkpoints, newest first."""
        return committed(self.folder)

    def newest_whole(self) -> int | None:
        """Return the step of the newest checkpoint whose manifest is intact and whose files have the right sizes."""
        for path in self.list():
            try:
                self.manifest(path)
            except CorruptCheckpointError:
                continue
            except CheckpointError:
                pass  # it cannot be read, and a load will say why
            return step_of(path)
        return None

    def is_committed(self, step: int) -> bool:
        """True if `step` has been saved. Raises CheckpointError where the disk does not say."""
        with file_errors("looking for", path := self.path(step) / manifests.NAME):
            return fsio.is_there(path)

    def next_exchange_number(self) -> int:
        """Return a number for the next save or load. All ranks save and load in the same order, so theirs is equal."""
        self._conversations += 1
        return self._conversations

    def begin(self, step: int) -> Path:
        """Create and return a fresh folder for the files of `step`, next to its final place."""
        self._refuse_if_overtaken()
        temporary = self.path(step).with_name(f"{self.path(step).name}.tmp-{secrets.token_hex(4)}")
        with file_errors("creating", temporary):
            try:
                fsio.make_dir(temporary, parents=1)
            except OSError:
                self.abandon(temporary)
                raise
        self._begun.add(temporary)
        return temporary

    def write(self, path: Path, chunks: Iterable[memoryview]) -> None:
        """Write one rank's file and flush it to disk.

        The folder must exist: a rank that is late would make one anew that the next attempt has removed.
        """
        with file_errors("writing", path):
            fsio.write_stream(path, chunks, self.on_progress)

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Make what was written in `temporary` the checkpoint of its step. On an error commit nothing."""
        final = self.path(manifest.step)
        # The manifest must not vouch for files that are not complete.
        manifests.check_sizes(temporary, manifest)
        with file_errors("committing", final):
            fsio.write_atomic(temporary / manifests.NAME, manifest.encode())
            self._refuse_if_overtaken()  # as late as possible: another attempt may have started during the write
            # A rename cannot replace it. Before this there is nothing better to take its place.
            if fsio.is_there(final):
                self.reject(final, "it is incomplete")
            fsio.rename_dir(temporary, final)
        self._begun.discard(temporary)
        return final

    def replace_meta(self, step: int, meta: Mapping[str, Any]) -> None:
        """Replace the ``meta`` of the committed checkpoint of ``step``. Its state was evaluated after the save."""
        path = self.path(step)
        with file_errors("describing", path):
            self._refuse_if_overtaken()
            fsio.write_atomic(path / manifests.NAME, dataclasses.replace(self.manifest(path), meta=meta).encode())
        self._figures.pop(path, None)

    def _refuse_if_overtaken(self) -> None:
        if not self._is_ours():
            raise CheckpointError(f"{self.folder} belongs to a later attempt of the run: this one must not write there")

    def abandon(self, temporary: Path) -> None:
        """Remove what a failed save wrote. What cannot be removed now is left to :meth:`remove_leftovers`."""
        self._begun.discard(temporary)
        try:
            fsio.remove_tree(temporary)
        except OSError as error:
            log.warning("%s is left behind: %s", temporary, error)

    def remove_leftovers(self) -> Sequence[Path]:
        """Remove what dead writers left, when an attempt starts: what was not begun here has no writer any more."""
        self._refuse_if_overtaken()
        stale = [path for path in _entries(self.folder) if _TEMPORARY.fullmatch(path.name) and path not in self._begun]
        for path in stale:
            log.info("removing %s, left by a writer that died", path)
            self.abandon(path)
        return stale

    def verify(self, path: Path) -> Manifest:
        """Read every byte of the checkpoint at `path`. Raises CorruptCheckpointError that names the damaged file."""
        manifest = self.manifest(path)
        manifests.check_parts(path, manifest.parts())
        return manifest

    def manifest(self, path: Path, *, sizes: bool = True) -> Manifest:
        """Return the manifest at `path`. Raises CorruptCheckpointError as `verify` does.

        ``sizes``: check every file's size, too, which one rank does for all: a thousand ranks have a thousand files.
        """
        manifest = manifests.read(path)
        if manifest.step != step_of(path):
            raise CorruptCheckpointError(f"{path} holds step {manifest.step}: the folder was renamed")
        if sizes:
            manifests.check_sizes(path, manifest)
        return manifest

    def refuse_untrusted(self, path: Path) -> None:
        """Raise CheckpointError unless only this user and root can change `path`.

        `path` is `folder` itself or a checkpoint in it. Another user with write access could give a resuming run any
        weights, with correct digests. A link counts as its target: people put `checkpoints` on another disk with one.
        A link without a target passes here, and counts as damage when it is read.
        """
        with file_errors("looking at", path):
            for each in (path, *(path.iterdir() if path != self.folder else ())):
                why = trust.reason_against(each)
                if why is not None:
                    me = trust.user_name(os.geteuid())
                    raise CheckpointError(
                        f"{why}, and so choose what a resumed run continues with. If you trust what is there: "
                        f"`chmod -R go-w {each}` (and, as root, `chown -R {me} {each}`), then resume the run; else "
                        "start a new run"
                    )

    def prune(self) -> Sequence[Path]:
        """Remove all valid checkpoints but those to `keep`. Call it only after the newest is committed.

        Valid means here: the manifest's crc32 is right and all files have the right sizes. Damaged checkpoints are
        neither counted nor removed. A run may keep thousands (``checkpoint.keep_every``), so of those already found
        valid only the newest, on which a resume depends, are checked again.
        """
        self._refuse_if_overtaken()
        valid: dict[Path, Manifest] = {}
        for path in self.list():
            # Check the newest each time, and an older one only once.
            if path not in self._figures or len(valid) < self.keep.newest:
                manifest = self.valid_manifest(path)
                if manifest is None:
                    continue
                self._figures[path] = dataclasses.replace(manifest, files={}, tensors={}, values={}, headers=())
            valid[path] = self._figures[path]
        self._figures = dict(valid)
        stay = self.keep.steps([*valid.values()])
        old = [path for path, manifest in valid.items() if manifest.step not in stay]
        for path in old:
            with file_errors("removing", path):
                fsio.remove_as(path, path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}"))
        return old

    def valid_manifest(self, path: Path) -> Manifest | None:
        """Return the manifest at `path`. None if it is not intact, or a file has another size."""
        try:
            return self.manifest(path)
        except CheckpointError:
            return None

    def reject(self, path: Path, reason: str) -> Path:
        """Move a damaged checkpoint aside so that its step can be saved again. It is kept for inspection."""
        self._refuse_if_overtaken()
        aside = path.with_name(f"{path.name}.bad-{secrets.token_hex(4)}")
        log.warning("moving %s to %s: %s", path, aside.name, reason)
        with file_errors("moving aside", path):
            fsio.rename_dir(path, aside)
        return aside


def pick(run: RunDir, text: str | None) -> list[Path]:
    """Return the checkpoint with this name or step, or all. Raises RequestError for none."""
    there = committed(run.checkpoints)
    chosen = [path for path in there if text in (None, path.name, str(step_of(path)))]
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in there) or "none"
        which = "" if text is None else f" of step {text}"
        raise RequestError(f"run {run.id}: no checkpoint{which}; there are: {steps}")
    return chosen
