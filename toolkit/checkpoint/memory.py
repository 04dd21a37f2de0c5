"""Copies of the training state in the memory of the ranks' nodes, for a restart inside the job.

The agent of a node holds two anonymous files in memory (memfd_create(2)) for each of its ranks. They outlive the ranks,
and the kernel frees them when the agent ends, however it ends. Every ``checkpoint.memory_every_steps`` steps a rank
copies what it has into the older one of its two; replicated values are in the files of the node's first rank only. The
ranks exchange nothing for it. At the next start they agree on the newest step that all of them hold.

A file begins with a head: a magic number, and where its description is. The head is written last, once the digests of
all tensors are known: a rank that dies in between leaves a file that holds nothing, and the other one.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit import logs
from toolkit.checkpoint import tensors
from toolkit.checkpoint.exchange import Exchange, KeyValue, describe, failures_told
from toolkit.checkpoint.manifest import (
    IN_MEMORY,
    Manifest,
    Part,
    TensorRecord,
    ValueRecord,
    file_name,
    parse_tensor,
    parse_value,
)
from toolkit.checkpoint.reader import Loaded, fill_state
from toolkit.checkpoint.writer import KINDS
from toolkit.dist.state import Entry, Json, Replicated, Sharded, State
from toolkit.errors import ConfigError

#: Set by the agent: this rank's two files, then those of the node's first rank.
VARIABLE = "TOOLKIT_STATE_MEMORY"
KEY = "checkpoint.memory_every_steps"
_HEAD = struct.Struct("<8sQQI")  #: magic number, start, size and crc32 of the description
_MAGIC = b"tkstate1"
_ALIGNMENT = 64

#: When a state was held: the attempt and the step.
Moment = tuple[int, int]
log = logs.get(__name__)


class Memory:
    """One rank's two files."""

    def __init__(self, rank: int, world_size: int, attempt: int, local_world_size: int, paths: Sequence[str]) -> None:
        self._rank, self._world_size, self._attempt = rank, world_size, attempt
        self._local_world_size = local_world_size
        #: the one that is written next first: that which holds nothing, or the older state
        self._own = sorted((_File(path) for path in paths[:2]), key=lambda file: file.moment() or (0, 0))
        self._first = [_File(path) for path in paths[2:]]  #: none for the first rank itself
        self._sealing: threading.Thread | None = None
        self._has_said_so = False

    @staticmethod
    def of_this_rank(rank: int, world_size: int, attempt: int, environ: Mapping[str, str]) -> Memory | None:
        """Return the files that our agent holds for us; None, with a warning, where no agent does."""
        paths = environ.get(VARIABLE, "")
        local_rank, local_world_size = int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", 1))
        try:
            if paths:
                found = paths.split(":")[: 2 if local_rank == 0 else 4]
                return Memory(rank, world_size, attempt, local_world_size, found)
            why = "no agent of the toolkit has started this rank"
        except OSError as error:
            why = str(error)
        log.warning("%s is not used: %s", KEY, why)
        return None

    # ------------------------------------------------------------------------------------------------------- writing

    def write(self, step: int, state: State, meta: Mapping[str, Json]) -> None:
        """Copy ``state`` as it is after ``step`` steps. Its digests are made by a thread while the training goes on.

        Raises ConfigError where the copies do not fit into the node's memory.
        """
        self.wait()
        file = self._own[0]
        is_first = not self._first
        own = {name: entry for name, entry in state.items() if is_first or not isinstance(entry, Replicated)}
        starts, end = _layout(own)
        if not self._has_said_so:
            self._refuse_too_much(end)
        file.open(end)
        copies = {name: _copy(name, own[name], file, start) for name, start in starts.items()}
        about = {
            "attempt": self._attempt,
            "step": step,
            "world_size": self._world_size,
            "rank": self._rank,
            "meta": dict(meta),
            "values": {
                name: {"kind": KINDS[type(entry)], "rank": self._rank, "value": entry.value}
                for name, entry in own.items()
                if name not in starts
            },
        }
        text = json.dumps(about)

        def seal() -> None:
            records = {name: _record(name, entry, self._rank, starts[name]) for name, entry in copies.items()}
            described = json.dumps({name: dataclasses.asdict(record) for name, record in records.items()})
            file.seal(f'{{"about": {text}, "tensors": {described}}}'.encode(), end)
            self._own.reverse()  # not where it failed: the other one holds the newest state then

        self._sealing = threading.Thread(target=seal, name=f"memory-{step}", daemon=True)
        self._sealing.start()

    def wait(self) -> None:
        """Wait until what was written last is complete."""
        if self._sealing is not None:
            self._sealing.join()

    def _refuse_too_much(self, size_bytes: int) -> None:
        needed, free = 2 * size_bytes * self._local_world_size, _free_bytes()
        if needed > free:
            raise ConfigError(
                f"{KEY}: two copies of the state of {self._local_world_size} ranks take {needed / 1e9:.1f} GB of this "
                f"node's memory, and {free / 1e9:.1f} GB are free: raise cluster.mem_gb, or set it to null"
            )
        log.info("the state is kept in memory, too: 2 x %.1f MB a rank", size_bytes / 1e6)
        self._has_said_so = True

    # ------------------------------------------------------------------------------------------------------- reading

    def load(
        self, places: State | Callable[[Manifest], State], kv: KeyValue | None, newer_than: int | None
    ) -> Loaded | None:
        """Fill ``places`` with the newest state that all ranks hold, if its step is above ``newer_than``.

        Every rank calls it, and all return a state, or all None. Where one rank finds its copy damaged nothing of it is
        to be used: what was filled is to be filled from a checkpoint. ``newer_than`` is rank 0's to know.
        """
        talk = Exchange(
            kv, rank=self._rank, world_size=self._world_size, topic=f"memory/{self._attempt}", number=1, timeout_s=600.0
        )
        if self._rank:
            return self._follow(places, talk)
        with failures_told(talk, "no state was loaded from memory"):
            held = set(self._held())
            for report in talk.gather().values():
                held &= {(int(attempt), int(step)) for attempt, step in report["held"]}
            moment = max(held, default=None)
            if moment is None or moment[1] <= (newer_than or 0):
                talk.tell({"moment": None})
                return None
            talk.tell({"moment": moment})
            loaded, problems = self._try(places, moment)
            problems += [report["damaged"] for report in talk.gather().values() if "damaged" in report]
            talk.tell({"done": not problems})
        if problems:
            log.warning("the state of step %d in memory is not used: %s", moment[1], "; ".join(problems))
            return None
        log.info("resuming from memory, where step %d is", moment[1])
        return loaded

    def _follow(self, places: State | Callable[[Manifest], State], talk: Exchange) -> Loaded | None:
        talk.report({"held": self._held()})
        moment = talk.listen()["moment"]
        if moment is None:
            return None
        loaded, problems = self._try(places, (moment[0], moment[1]))
        talk.report({"damaged": problems[0]} if problems else {})
        return loaded if talk.listen()["done"] else None

    def _held(self) -> list[Moment]:
        """Return the moments of which all that this rank needs is on its node."""
        own = {file.moment_of(self._rank, self._world_size) for file in self._own}
        if self._first:
            own &= {file.moment_of(None, self._world_size) for file in self._first}
        return [moment for moment in own if moment is not None]

    def _try(self, places: State | Callable[[Manifest], State], moment: Moment) -> tuple[Loaded | None, list[str]]:
        try:
            manifest = self._manifest(moment)
            return fill_state(places, manifest, IN_MEMORY, self._rank, self._world_size), []
        except Exception as error:  # whatever is wrong with it, there is the disk
            return None, [f"rank {self._rank}: {describe(error)}"]

    def _manifest(self, moment: Moment) -> Manifest:
        """Describe what is held of ``moment``: all of our own files, and what is replicated of the first rank's."""
        found: dict[str, TensorRecord] = {}
        values: dict[str, ValueRecord] = {}
        meta: Mapping[str, Any] = {}
        for file in (*self._first, *self._own):
            described = file.read()
            if described is None or _moment(described) != moment:
                continue
            meta = described["about"]["meta"]
            kinds = KINDS.values() if file in self._own else [KINDS[Replicated]]
            for name, fields in described["tensors"].items():
                if fields["kind"] in kinds:
                    found[name] = file.placed(parse_tensor(fields))
            for name, fields in described["about"]["values"].items():
                if fields["kind"] in kinds:
                    values[name] = parse_value(fields)
        return Manifest(moment[1], self._world_size, {}, meta, {}, found, values)


class _File:
    """One anonymous file in memory, which the agent holds."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.name = str(self._fd)
        self._map: mmap.mmap | None = None

    def open(self, end: int) -> None:
        """Declare what it holds invalid, and make room for tensors up to ``end``."""
        os.pwrite(self._fd, bytes(_HEAD.size), 0)
        if self._map is None or len(self._map) < end:
            os.ftruncate(self._fd, end)
            self._map = mmap.mmap(self._fd, end)

    def bytes_at(self, start: int, size_bytes: int) -> torch.Tensor:
        """Return that part of it, live."""
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=size_bytes)

    def seal(self, described: bytes, end: int) -> None:
        """Declare it complete: ``described`` goes to ``end``."""
        os.pwrite(self._fd, described, end)
        os.pwrite(self._fd, _HEAD.pack(_MAGIC, end, len(described), zlib.crc32(described)), 0)

    def read(self) -> dict[str, Any] | None:
        """Return what it says of itself; None where it is empty or not complete."""
        head = os.pread(self._fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        magic, start, size_bytes, crc32 = _HEAD.unpack(head)
        if magic != _MAGIC:
            return None
        described = os.pread(self._fd, size_bytes, start)
        found: dict[str, Any] | None = json.loads(described) if zlib.crc32(described) == crc32 else None
        return found

    def moment(self) -> Moment | None:
        found = self.read()
        return None if found is None else _moment(found)

    def moment_of(self, rank: int | None, world_size: int) -> Moment | None:
        """Return when the state that it holds was written, if by ``rank`` (None: any) among so many."""
        found = self.read()
        if found is None or found["about"]["world_size"] != world_size or rank not in (None, found["about"]["rank"]):
            return None
        return _moment(found)

    def placed(self, record: TensorRecord) -> TensorRecord:
        """Return ``record`` with the name by which this process finds the file."""
        return dataclasses.replace(record, parts=tuple(dataclasses.replace(p, file=self.name) for p in record.parts))


def _moment(described: Mapping[str, Any]) -> Moment:
    return described["about"]["attempt"], described["about"]["step"]


def _layout(own: Mapping[str, Entry]) -> tuple[dict[str, int], int]:
    """Return where each tensor of ``own`` begins, and where the last one ends."""
    starts: dict[str, int] = {}
    end = _ALIGNMENT
    for name, entry in own.items():
        if isinstance(entry.value, torch.Tensor):
            starts[name] = end
            size_bytes = entry.value.numel() * entry.value.element_size()
            end += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _copy(name: str, entry: Entry, file: _File, start: int) -> Entry:
    """Return ``entry`` with a copy of its tensor in ``file``."""
    live = entry.value
    assert isinstance(live, torch.Tensor)
    tensors.check_plain(name, live)
    live = live.detach().resolve_conj().resolve_neg()
    if not live.numel():
        return entry
    kept = file.bytes_at(start, live.numel() * live.element_size())
    kept.copy_(live.contiguous().reshape(-1).view(torch.uint8))
    return dataclasses.replace(entry, value=kept.view(live.dtype).reshape(live.shape))


def _record(name: str, entry: Entry, rank: int, start: int) -> TensorRecord:
    """Describe the copy that stands at ``start``."""
    value = entry.value
    assert isinstance(value, torch.Tensor)
    shape = tuple(value.shape)
    whole, pieces = shape, [(value, (0,) * len(shape))]
    if isinstance(entry, Sharded):
        whole, pieces = entry.global_shape, [*entry.pieces()]
    parts = []
    for piece, offsets in pieces:
        data = tensors.to_bytes(name, piece)
        parts.append(Part(file_name(rank), start, len(data), offsets, tuple(piece.shape), zlib.crc32(data)))
        start += len(data)
    return TensorRecord(KINDS[type(entry)], tensors.dtype_name(value), whole, tuple(parts))


def _free_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how much memory this process may still take: the machine's, or that of a control group (version 2)."""
    found = [
        1024 * int(line.split()[1])
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
        own = next((line[4:] for line in lines if line.startswith("0::/")), "")
        for group in (groups / own, *(groups / own).parents):
            if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
                found.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # version 1, or a container that hides it
        pass
    return min(found, default=1 << 62)
