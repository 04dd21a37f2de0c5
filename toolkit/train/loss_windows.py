"""Means between two logging steps, over all ranks: of a job's losses, and of what a user's loop logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from toolkit.base.errors import JobCodeError
from toolkit.ranks.collectives import gather_rows
from toolkit.ranks.state import Json

#: The tag of the loss that `train.on_nan` judges.
LOSS = "train/loss"
#: Most characters shown of a value that is not a number.
_MOST_SHOWN = 60


class LossWindow:
    """Sums and counts by tag since the last :meth:`take`. Ranks may add different tags."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        by_rank: Callable[[Mapping[str, float | Tensor]], Mapping[str, Tensor]],
        gather: Callable[[Any], list[Any]],
        *,
        are_parts: bool = False,
    ) -> None:
        """``by_rank`` and ``gather`` are those of :class:`toolkit.strategies.protocol.Strategy`.

        ``are_parts``: the ranks' values of a step add up to one value, which is 0 for a tag that it lacks. Else each
        value counts, as often as it was added.
        """
        self._rank, self._world_size, self._by_rank, self._gather = rank, world_size, by_rank, gather
        self._are_parts = are_parts
        self._whole: Callable[[list[float]], float] = max if are_parts else sum  # makes one count of the ranks' counts
        self._tags: list[str] = []  #: those that all ranks know, in the same order
        self._sums: dict[str, float | Tensor] = {}
        self._counts: dict[str, int] = {}
        self._after_each: list[float | Tensor] = []
        self.taken: list[float | Tensor] = []  #: this rank's sums of the loss after each value, before the last take

    def add(self, values: Mapping[str, float | Tensor]) -> None:
        """Add values by tag. A tensor is not read."""
        for tag, value in values.items():
            # Not in place, and nothing else is kept: the value may be memory that the next step reuses.
            self._sums[tag] = value + self._sums.get(tag, 0.0)
            self._counts[tag] = self._counts.get(tag, 0) + 1
        if LOSS in values:
            self._after_each.append(self._sums[LOSS])

    def leave_out(self, steps: int) -> None:
        """Leave ``steps`` steps out of the means. Their losses were added as 0 because the steps were left out."""
        if steps:
            self._counts[LOSS] -= steps

    @property
    def is_open(self) -> bool:
        """True if this rank has values that are not taken yet."""
        return bool(self._sums)

    def take(self, figure: float = 0.0) -> tuple[dict[str, float], list[float]]:
        """Return the means by tag and the ``figure`` of each rank, and empty the window.

        Both are equal on every rank. A collective and a host sync. A tag of which all was left out has no mean.
        """
        rows = self._rows(figure)
        counts = {tag: self._whole(rows[f"count {LOSS if self._are_parts else tag}"].tolist()) for tag in self._tags}
        means = {tag: rows[f"sum {tag}"].sum().item() / count for tag, count in counts.items() if count}
        self.taken, self._after_each = self._after_each, []
        self._sums, self._counts = {}, {}
        return means, rows["figure"].tolist()

    def state(self) -> dict[str, Json]:
        """Return the window for a checkpoint, equal on every rank. A collective and a host sync."""
        rows = self._rows(0.0)
        return {
            tag: {"sums": rows[f"sum {tag}"].tolist(), "counts": rows[f"count {tag}"].tolist()} for tag in self._tags
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state`. If it is of another number of ranks, rank 0 gets what all had."""
        self._tags = [*saved]
        for tag, rows in saved.items():
            sums, counts = rows["sums"], rows["counts"]
            if len(sums) == self._world_size:
                value, count = sums[self._rank], int(counts[self._rank])
            else:
                value, count = (sum(sums), int(self._whole(counts))) if self._rank == 0 else (0.0, 0)
            if count:
                self._sums[tag], self._counts[tag] = value, count

    def _rows(self, figure: float) -> Mapping[str, Tensor]:
        """Return each rank's ``figure``, and its sum and count of each tag that any rank has."""
        while True:
            new = [tag for tag in self._sums if tag not in self._tags]
            values: dict[str, float | Tensor] = {"figure": figure, "new": float(len(new))}
            for tag in self._tags:
                values[f"sum {tag}"] = self._sums.get(tag, 0.0)
                values[f"count {tag}"] = float(self._counts.get(tag, 0))
            rows = self._by_rank(values)
            if not rows["new"].any():
                return rows
            # The ranks tell each other their tags only where some are new.
            self._tags += dict.fromkeys(tag for tags in self._gather(new) for tag in tags if tag not in self._tags)


def number_of(tag: str, value: Tensor | float) -> Tensor | float:
    """Return a value for a window. A tensor on a GPU is not read. Raises JobCodeError for other than single numbers."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cpu:
        return value.detach().double().reshape(())  # to read it would wait for the GPU
    try:
        if not isinstance(value, (str, bytes)):  # float() would take "3.5"
            return float(value.item() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    if isinstance(value, Tensor):
        what = f"has the shape {tuple(value.shape)} and the type {value.dtype}"
    else:
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        what = f"is {shown}, of type {type(value).__name__}"
    raise JobCodeError(f"run.log: {tag} {what}; log single numbers")


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """Return the value of every rank, by rank; JSON. A collective."""
    # Texts differ in length: exchange the lengths first, then rows that are padded to the longest.
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    sizes = gather_rows(length).flatten().tolist()
    row = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = gather_rows(row).cpu()
    return [json.loads(bytes(rows[rank, :size].numpy())) for rank, size in enumerate(sizes)]


def with_prefix(values: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return ``values`` by tag. A name without a slash gets the prefix ``train/``."""
    return {name if "/" in name else f"train/{name}": value for name, value in values.items()}
