"""Saving: every rank writes its part and rank 0 commits. `save` returns when every rank knows the outcome.

The kinds of state alone decide who writes what. Rank 0 writes the replicated values. Every rank writes its own values
and its shards, except shards that are copies of what another rank writes.

In the background (:class:`BackgroundSave`) the loop waits only for a copy into kept buffers. A thread writes and
commits. The buffers belong to this module and are reused: new memory costs a page fault every 4 KB, ten times the copy
itself. Host memory for CUDA tensors is page-locked, so that the copies are only enqueued; the thread waits for them.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import platform
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from toolkit.base import logs
from toolkit.base.errors import CheckpointError, SaveGivenUpError, UnsavableStateError, listing
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint import tensors
from toolkit.checkpoint.exchange import (
    Exchange,
    KeyValueStore,
    ReplicaSums,
    describe,
    failure,
    failures_told,
    refuse_unequal,
)
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.manifest import Manifest, Name, TensorPart, TensorRecord, ValueRecord
from toolkit.devices import page_locked
from toolkit.files.records import decode
from toolkit.ranks.state import Entry, Json, PerRank, Replicated, Sharded, State, is_written_by, pieces_of

log = logs.get(__name__)

KINDS = {Replicated: "replicated", PerRank: "per_rank", Sharded: "sharded"}


def save(
    checkpoints: CheckpointFolder,
    step: int,
    state: State,
    meta: Mapping[str, Json],
    *,
    rank: int,
    world_size: int,
    kv: KeyValueStore | None,
    attempt: int = 1,
    timeout_s: float = 600.0,
    replicas: ReplicaSums | None = None,
    write_files: Callable[[Path], None] | None = None,
) -> Path:
    """Save `state` and rank 0's `meta` as the checkpoint of `step`. All ranks call it; all return or all raise.

    A step that is committed already is left as it is. CheckpointError, with the same message on every rank, says which
    rank failed and why, or which ranks did not answer for `timeout_s`; nothing is committed then.

    Raises UnsavableStateError, and commits nothing, where replicated values are not equal bit for bit on all ranks,
    copies of a shard are not, or a tensor is not dense. If `state` is a copy that has only what this rank writes,
    `replicas` are the values of that time; copies of shards are not compared then.

    `write_files` is called on every rank with the new folder, and writes a library's own checkpoint into folders in it.
    """
    number = checkpoints.next_exchange_number()
    topic = f"checkpoint/{checkpoints.folder.name}/{attempt}"
    talk = Exchange(kv, rank=rank, world_size=world_size, topic=topic, number=number, timeout_s=timeout_s)
    if rank == 0:
        return _lead(checkpoints, step, state, meta, talk, world_size, write_files)
    begun = talk.listen()
    if begun.get("done"):
        return checkpoints.path(step)
    # A failure is reported first, and raised once rank 0 has sent it to all ranks.
    try:
        if begun["step"] != step:
            raise CheckpointError(f"it saves step {step} while rank 0 saves step {begun['step']}")
        folder = checkpoints.named(begun["folder"])
        if write_files is not None:
            write_files(folder)
        part = _write_own(checkpoints, folder, rank, state)
        replicas = replicas or ReplicaSums(state)
        talk.report({"part": dataclasses.asdict(part), "replicas": replicas.digest(), "copies": _copies(state)})
    except Exception as error:
        talk.report(failure(error, f"rank {rank} on {socket.gethostname()}: {describe(error)}"))
        if write_files is None:  # else rank 0 may wait for this rank within the library, and never answer
            talk.listen()
        raise
    # Rank 0 answers once it has committed; its error is raised here. Before that it may ask for the sums.
    if "sums" in talk.listen():
        talk.report({"sums": replicas.sums()})
        talk.listen()
    return checkpoints.path(step)


def _lead(
    checkpoints: CheckpointFolder,
    step: int,
    state: State,
    meta: Mapping[str, Json],
    talk: Exchange,
    world_size: int,
    write_files: Callable[[Path], None] | None,
) -> Path:
    """Run rank 0's side: begin, write with the others, commit, tell them, prune."""
    # The others wait for rank 0, so every failure is sent to them.
    with failures_told(talk, f"the checkpoint of step {step} was not written"):
        if checkpoints.is_committed(step):
            talk.tell({"done": True, "step": step})
            return checkpoints.path(step)
        folder = checkpoints.begin(step)
        talk.tell({"folder": folder.name, "step": step})
        try:
            if write_files is not None:
                write_files(folder)
            # Write rank 0's part while the others write theirs, then compare and merge the reports.
            own = _write_own(checkpoints, folder, 0, state)
            reports = talk.gather()
            if reports:
                digests = {rank: report["replicas"] for rank, report in reports.items()}
                refuse_unequal(talk, ReplicaSums(state), digests)
            files = manifests.library_files(folder)  # files of all ranks: each has reported that its own are written
            sizes = {part.file: part.size_bytes for record in files.values() for part in record.parts}
            library = _WrittenPart(sizes, files, {})
            parts = [own, *(_WrittenPart.from_json(report["part"]) for report in reports.values()), library]
            manifest = _merge(step, world_size, meta, parts)
            # Copies of shards are compared last: any rank may have written the original.
            for rank, report in reports.items():
                _check_copies(manifest, rank, report["copies"])
            final = checkpoints.commit(folder, manifest)
        except Exception:
            checkpoints.abandon(folder)
            raise
    talk.tell({"done": True})
    # Older checkpoints go only now that the newest is on disk. No other rank waits for it. A surplus checkpoint must
    # not end a run whose newest one is safe.
    try:
        checkpoints.prune()
    except CheckpointError as error:
        log.warning("older checkpoints stay: %s", error)
    return final


@dataclasses.dataclass(frozen=True)
class _WrittenPart:
    """The files, tensors and values that one rank wrote."""

    files: Mapping[str, int]
    tensors: Mapping[Name, TensorRecord]
    values: Mapping[Name, ValueRecord]
    headers: tuple[TensorPart, ...] = ()

    @staticmethod
    def from_json(fields: dict[str, Any]) -> _WrittenPart:
        part = decode(_WrittenPart, fields)
        for record in part.tensors.values():
            manifests.check_size(record)
        return part


def _write_own(checkpoints: CheckpointFolder, folder: Path, rank: int, state: State) -> _WrittenPart:
    """Write this rank's tensors into `folder`. A rank without tensors (all but rank 0 under ddp) makes no file."""
    held: dict[str, Entry] = {}
    widths: dict[str, int] = {}
    values: dict[str, ValueRecord] = {}
    for name, entry in state.items():
        if not is_written_by(entry, rank):
            continue
        if isinstance(entry.value, torch.Tensor):
            held[name], widths[name] = entry, entry.value.element_size()
        else:
            values[name] = ValueRecord(KINDS[type(entry)], rank, entry.value)
    if not held:
        return _WrittenPart({}, {}, values)
    # Wide dtypes first: then each tensor is aligned to its width, for programs that map the file.
    wide_first = {name: held[name] for name in sorted(held, key=lambda name: -widths[name])}
    head = _head(wide_first)
    written: dict[str, TensorRecord] = {}
    path = folder / manifests.file_name(rank)
    checkpoints.write(path, _stream(wide_first, path.name, head, written))
    # The manifest keeps the order of the state, and so do exports.
    records = {name: written[name] for name in held}
    size_bytes = len(head) + sum(part.size_bytes for record in records.values() for part in record.parts)
    header_part = TensorPart(path.name, 0, len(head), (0,), (len(head),), zlib.crc32(head))
    return _WrittenPart({path.name: size_bytes}, records, values, (header_part,))


def _head(held: Mapping[str, Entry]) -> bytes:
    """Return the file's header. All shapes and dtypes are known before any tensor is copied to the host."""
    inside: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, entry in held.items():
        pieces = pieces_of(entry)
        for value, offsets in pieces:
            spans = [f"{start}:{start + size}" for start, size in zip(offsets, value.shape, strict=True)]
            # Several pieces of one tensor differ in name by their places in it.
            label = name if len(pieces) == 1 else f"{name}[{', '.join(spans)}]"
            assert label not in inside, label
            inside[label] = value.dtype, tuple(value.shape)
    return tensors.encode_header(inside)


def _stream(
    held: Mapping[str, Entry], file: str, head: bytes, records: dict[str, TensorRecord]
) -> Iterator[memoryview]:
    """Yield the header and the bytes of one tensor after the other. Record each in `records` as it is yielded."""
    yield memoryview(head)
    start = len(head)
    for name, entry in held.items():
        parts: list[TensorPart] = []
        for data, part in parts_of(name, entry, file, start):
            parts.append(part)
            start += part.size_bytes
            yield data
        records[name] = record_of(entry, parts)


def parts_of(name: str, entry: Entry, file: str, start: int) -> Iterator[tuple[memoryview, TensorPart]]:
    """Yield the bytes of each piece of a tensor, with its part in `file`. The first part begins at byte `start`."""
    for value, offsets in pieces_of(entry):
        data = tensors.to_bytes(name, value)
        yield data, TensorPart(file, start, len(data), offsets, tuple(value.shape), zlib.crc32(data))
        start += len(data)


def record_of(entry: Entry, parts: Iterable[TensorPart]) -> TensorRecord:
    """Describe a tensor whose bytes are in `parts`."""
    assert isinstance(entry.value, torch.Tensor)
    shape = entry.global_shape if isinstance(entry, Sharded) else tuple(entry.value.shape)
    return TensorRecord(KINDS[type(entry)], tensors.dtype_name(entry.value), shape, tuple(parts))


def _copies(state: State) -> dict[str, Any]:
    """Return a crc32 for each copy of a part that another rank writes, with its offsets. Rank 0 compares them."""
    return {
        name: [[offsets, zlib.crc32(tensors.to_bytes(name, value))] for value, offsets in entry.pieces()]
        for name, entry in state.items()
        if isinstance(entry, Sharded) and entry.is_copy
    }


def _check_copies(manifest: Manifest, rank: int, copies: Mapping[str, Any]) -> None:
    """Raise UnsavableStateError with the parts that `rank` holds differently from their writer."""
    different = []
    for name, pieces in copies.items():
        parts = manifest.tensors[name].parts if name in manifest.tensors else ()
        written = {(part.offsets, part.crc32) for part in parts}
        if any((tuple(offsets), crc32) not in written for offsets, crc32 in pieces):
            different.append(name)
    if different:
        raise UnsavableStateError(
            f"{listing(different)}: rank {rank} holds another value than the rank that writes its part; "
            "the replicas have drifted apart"
        )


def _merge(step: int, world_size: int, meta: Mapping[str, Json], parts: Iterable[_WrittenPart]) -> Manifest:
    """Merge what all ranks wrote into one manifest. Raises CheckpointError where parts do not make up whole tensors."""
    files: dict[str, int] = {}
    headers: list[TensorPart] = []
    values: dict[str, ValueRecord] = {}
    firsts: dict[str, TensorRecord] = {}
    pieces: dict[str, list[TensorPart]] = {}
    for part in parts:
        files |= part.files
        headers += part.headers
        for name, value in part.values.items():
            _check_new(name, values, firsts)
            values[name] = value
        for name, record in part.tensors.items():
            # Shards of one tensor come from several ranks: collect them under its name. Nothing else may share a name.
            first = firsts.setdefault(name, record)
            if record is not first:
                if not first.kind == record.kind == "sharded":
                    _check_new(name, {name: record})
                if (first.dtype, first.shape) != (record.dtype, record.shape):
                    one, other = f"{first.dtype} {first.shape}", f"{record.dtype} {record.shape}"
                    raise CheckpointError(f"{name} is {one} on one rank and {other} on another")
            pieces.setdefault(name, []).extend(record.parts)
    # A rank that has died, or a wrong shard, leaves a gap: then nothing may be committed.
    merged: dict[str, TensorRecord] = {}
    for name, record in firsts.items():
        merged[name] = dataclasses.replace(record, parts=tuple(pieces[name]))
        try:
            manifests.check_cover(name, merged[name])
        except ValueError as error:
            raise CheckpointError(f"the ranks' parts of a sharded tensor overlap or leave a gap: {error}") from error
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return Manifest(step, world_size, versions, meta, files, merged, values, tuple(headers))


def _check_new(name: str, *known: Mapping[str, object]) -> None:
    if any(name in names for names in known):
        raise UnsavableStateError(
            f"two ranks declare {name} as their own; the name of a PerRank value must hold the rank"
        )


# ---------------------------------------------------------------------------------------------------- in the background


class Staging:
    """The staging buffers of one rank: one block for all tensors on its GPU, and a buffer for each other one."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._block = page_locked.Block()
        self._making: threading.Thread | None = None

    def allocate(self, state: State, rank: int) -> None:
        """Make the buffers for a later :meth:`copy`, in a thread, where the loop waits for a disk anyway."""
        if self._making is not None:
            return
        # What is to be stored may be copies of the training's own, which must not live on for this.
        own, on_gpu = _tensors(state, rank)
        like = {name: torch.empty_like(live, device="meta") for name, live in own.items()}
        on_device = page_locked.bind_current_device() if on_gpu else nullcontext()

        def make() -> None:
            with suppress(RuntimeError, OSError), on_device:  # out of memory: the copy will say so
                self._block.buffers_like({name: like[name] for name in on_gpu})
                for name in like.keys() - on_gpu:
                    buffer = torch.empty(like[name].shape, dtype=like[name].dtype)
                    ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)  # by one thread: torch would start more
                    self._buffers[name] = buffer

        self._making = threading.Thread(target=make, name="save-buffers", daemon=True)
        self._making.start()

    def copy(self, state: State, rank: int) -> tuple[State, Callable[[], None]]:
        """Copy what ``rank`` has to write of ``state`` as it is now.

        Returns the copy, and a callable that waits until it is complete. The next call overwrites the copy.
        """
        if self._making is not None:
            self._making.join()
        own, on_gpu = _tensors(state, rank)
        places = self._block.buffers_like({name: own[name] for name in on_gpu})
        staged: dict[str, Entry] = {}
        for name, entry in state.items():
            if is_written_by(entry, rank):
                staged[name] = dataclasses.replace(entry, value=self._copy(name, entry, places.get(name)))
        # Other copies are complete already.
        return staged, page_locked.stream_waiter() if on_gpu else lambda: None

    def _copy(self, name: str, entry: Entry, place: torch.Tensor | None) -> Any:
        live = entry.value
        if not isinstance(live, torch.Tensor):
            return copy.deepcopy(live)
        live = live.detach().resolve_conj().resolve_neg()  # such views have no bytes of their own
        kept = self._buffers.get(name) if place is None else place
        # Allocate only where the kept buffer does not fit: new memory is slow.
        if kept is None or (kept.shape, kept.dtype) != (live.shape, live.dtype):
            kept = self._buffers[name] = torch.empty(live.shape, dtype=live.dtype)
        if live.is_contiguous():  # as bytes: some dtypes of torch (int1) have no copy of their own
            tensors.as_bytes(kept).copy_(tensors.as_bytes(live), non_blocking=True)
        else:
            kept.copy_(live, non_blocking=True)
        return kept


def _tensors(state: State, rank: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors that ``rank`` has to write, and the names of those on a GPU."""
    values = {name: entry.value for name, entry in state.items() if is_written_by(entry, rank)}
    own = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return own, [name for name, tensor in own.items() if not tensor.is_cpu]


class CuttableClient:
    """A store client for one save alone: a client serves one call at a time. Once it is cut, every call is refused."""

    def __init__(self, client: KeyValueStore) -> None:
        self._client = client
        self.is_cancelled = False

    def set(self, key: str, value: str, /) -> None:
        self._open().set(key, value)

    def get(self, key: str, /) -> bytes:
        return self._open().get(key)

    def check(self, keys: list[str], /) -> bool:
        return self._open().check(keys)

    def delete_key(self, key: str, /) -> bool:
        return self._open().delete_key(key)

    def _open(self) -> KeyValueStore:
        if self.is_cancelled:
            raise CheckpointError("given up, because the training has ended")
        return self._client


class BackgroundSave:
    """One save, which ``write`` writes in a thread.

    An error is stored in ``error`` as a CheckpointError. Unless the save was given up, ``note_error`` gets it at once.
    """

    #: Seconds that `abandon` waits: an fsync cannot be interrupted.
    LONGEST_END_S = 5.0

    def __init__(
        self,
        step: int,
        client: CuttableClient | None,
        write: Callable[[], Path],
        note_error: Callable[[int, CheckpointError], None],
    ) -> None:
        self.step = step
        self.error: CheckpointError | None = None
        self.is_cancelled = False
        self._client = client
        self._write = write
        self._note_error = note_error
        self._thread = threading.Thread(target=self._run, name=f"save-{step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            text = f"the checkpoint of step {self.step} was not written: {describe(error)}"
            self.error = error if isinstance(error, CheckpointError) else CheckpointError(text)
            # Another rank may have given it up before this one.
            if not (self.is_cancelled or isinstance(error, SaveGivenUpError)):
                self._note_error(self.step, self.error)

    @property
    def in_save_thread(self) -> bool:
        """True if the calling thread is the one that writes."""
        return threading.current_thread() is self._thread

    def refuse_if_cancelled(self) -> None:
        """Raise CheckpointError, which all ranks learn of, if cancelled. Call it between two pieces of a file."""
        if self.is_cancelled:
            raise SaveGivenUpError("given up for a stop, which saves a later step")

    def wait(self) -> None:
        self._thread.join()

    def abandon(self) -> None:
        """Give the save up without telling the other ranks, which may have died.

        An interpreter that ends while a thread is in a call of torch's store aborts the process. That leaves a core
        file and hides the error that ended it.
        """
        self.is_cancelled = True
        if self._client is not None:
            self._client.is_cancelled = True
        self._thread.join(self.LONGEST_END_S)
