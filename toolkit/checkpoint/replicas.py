"""Tells whether ranks hold equal values. Sums of their bits are made where the values lie, and are compared.

So each save can prove it. Replicas that differ are an error of the job, or of a node, that no later save mends.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import torch

from toolkit.base.errors import UnsavableStateError, listing
from toolkit.checkpoint import page_locked
from toolkit.checkpoint.exchange import Exchange
from toolkit.checkpoint.tensors import as_bytes, check_plain
from toolkit.ranks.state import Json, Replicated, State


class ReplicaSums:
    """The values that a rank holds as all ranks do, as they were when this was made."""

    def __init__(self, state: State) -> None:
        values = {name: entry.value for name, entry in sorted(state.items()) if isinstance(entry, Replicated)}
        self._sums: dict[str, int] = dict.fromkeys(values, 0)
        found: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                found.setdefault(value.device, {})[name] = _sum_of_bits(name, value)
            else:
                self._sums[name] = _digest(value)
        # On a GPU all this is only enqueued. Another thread may read it, whose own stream would not wait for it.
        self._copies = [
            ([*sums], torch.stack([*sums.values()]).to("cpu", non_blocking=True)) for sums in found.values()
        ]
        self._wait = page_locked.enqueued() if any(device.type == "cuda" for device in found) else lambda: None

    def sums(self) -> Mapping[str, int]:
        """Return a number for each value. Waits for the GPU, if the values are there."""
        if self._copies:
            self._wait()
        while self._copies:
            names, copy = self._copies.pop()
            self._sums |= zip(names, copy.tolist(), strict=True)
        return self._sums

    def digest(self) -> int:
        """Return one number for all names and values."""
        return _digest(self.sums())


def refuse_unequal(talk: Exchange, own: ReplicaSums, digests: Mapping[int, int]) -> None:
    """Raise UnsavableStateError if the ranks' ``digests`` are not rank 0's. Ask them for their sums then.

    Only rank 0 calls this; the others :func:`answer`.
    """
    expected = own.digest()
    unequal = [rank for rank, digest in digests.items() if digest != expected]
    if not unequal:
        return
    talk.tell({"sums": True})
    refuse_differing(own.sums(), talk.gather()[unequal[0]]["sums"], unequal[0])


def refuse_differing(ours: Mapping[str, int], theirs: Mapping[str, int], rank: int) -> None:
    """Raise UnsavableStateError, naming the values of ``rank`` that differ from rank 0's, ``ours``."""
    # Compare the names first.
    if ours.keys() != theirs.keys():
        raise UnsavableStateError(
            f"rank {rank} declares other replicated values than rank 0; both must build the same model"
        )
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        raise UnsavableStateError(
            f"{listing(different)} declared as replicated, but rank {rank} and rank 0 hold different values; "
            "the replicas have drifted apart, or the value is per rank"
        )


def answer(talk: Exchange, own: ReplicaSums) -> None:
    """Wait for rank 0's verdict. Send it the sums if it asks for them. Raises CheckpointError for a failure."""
    if "sums" in talk.listen():
        talk.report({"sums": own.sums()})
        talk.listen()


def _sum_of_bits(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 8-byte words in C order, modulo 2^64, as a tensor that may still be computed."""
    check_plain(name, value)
    content = as_bytes(value.detach().resolve_conj().resolve_neg().contiguous())
    words, rest = content[: content.numel() // 8 * 8], content[content.numel() // 8 * 8 :]
    if words.storage_offset() % 8:  # torch reads words only where they are aligned
        words = words.clone()
    total = words.view(torch.int64).sum()
    return total + rest.sum() if rest.numel() else total


def _digest(value: Json) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
