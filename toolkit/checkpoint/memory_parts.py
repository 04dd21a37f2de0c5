"""One part of the state, copied into a file in memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import torch

from toolkit.checkpoint import page_locked, tensors
from toolkit.checkpoint.manifest import file_name
from toolkit.checkpoint.memory_file import START, MemoryFile, Pair
from toolkit.checkpoint.writer import KINDS, parts_of, record_of
from toolkit.ranks.state import Entry, Json, Replicated, State


def split(state: State) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return what all ranks have in common, and what this rank alone has."""
    shared: dict[str, Entry] = {}
    own: dict[str, Entry] = {}
    for name, entry in state.items():
        part = shared if isinstance(entry, Replicated) else own
        part[name] = entry
    return shared, own


def layout(own: Mapping[str, Entry]) -> tuple[dict[str, int], int]:
    """Return where each tensor of ``own`` begins, and where the last one ends, in bytes."""
    values = {name: entry.value for name, entry in own.items() if isinstance(entry.value, torch.Tensor)}
    return page_locked.layout(values, START)


class PartWriter:
    """A part of the state that is being written into a file."""

    def __init__(self, pair: Pair, entries: Mapping[str, Entry], about: Mapping[str, Json], rank: int) -> None:
        self._pair, self.file, self._entries, self._rank = pair, pair.next, entries, rank
        self._starts, self._end = layout(entries)
        values = {
            name: {"kind": KINDS[type(entry)], "rank": rank, "value": entry.value}
            for name, entry in entries.items()
            if name not in self._starts
        }
        self._about = json.dumps({**about, "values": values})  # serialized now: the values may change
        self._copies: dict[str, Entry] = {}

    def open(self, *, pinned: bool) -> None:
        """Allocate memory for the part; see :meth:`MemoryFile.open`."""
        self.file.open(self._end, at_once=True, pinned=pinned)

    def copy(self) -> None:
        """Copy the tensors, or enqueue the copies on the GPU."""
        for name, start in self._starts.items():
            self._copies[name] = _copy(name, self._entries[name], self.file, start)

    def seal(self) -> None:
        """Compute the digests, and mark the file complete."""
        records: dict[str, dict[str, Json]] = {}
        for name, entry in self._copies.items():
            pieces = parts_of(name, entry, file_name(self._rank), self._starts[name])
            parts = [part for _, part in pieces]
            records[name] = dataclasses.asdict(record_of(entry, parts))
        described = json.dumps(records)
        self.file.seal(f'{{"about": {self._about}, "tensors": {described}}}'.encode(), self._end)
        self._pair.turn()  # skipped on an error: the other file holds the newest state then


def _copy(name: str, entry: Entry, file: MemoryFile, start: int) -> Entry:
    """Return ``entry`` with a copy of its tensor in ``file``."""
    live = entry.value
    assert isinstance(live, torch.Tensor)
    tensors.check_plain(name, live)
    live = live.detach().resolve_conj().resolve_neg()
    if not live.numel():
        return entry
    kept = file.bytes_at(start, live.numel() * live.element_size())
    kept.copy_(tensors.as_bytes(live.contiguous()), non_blocking=True)
    return dataclasses.replace(entry, value=kept.view(live.dtype).reshape(live.shape))
