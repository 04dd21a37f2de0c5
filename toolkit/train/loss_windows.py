"""Means between two logging steps, over all ranks: of the Trainer's losses, and of what a user's loop logs.

They stay on the device until then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.base.errors import JobCodeError
from toolkit.ranks.collectives import gather_rows, sum_across_ranks
from toolkit.ranks.state import Entry, PerRank
from toolkit.strategies.protocol import StepOutput


class LossWindow:
    """Means of the global losses over the steps since the last :meth:`take`. They stay on the device until then.

    ``by_rank`` is :meth:`toolkit.strategies.protocol.Strategy.by_rank`.
    """

    def __init__(
        self, rank: int, world_size: int, by_rank: Callable[[Mapping[str, float | Tensor]], Mapping[str, Tensor]]
    ) -> None:
        self._rank, self._world_size, self._by_rank = rank, world_size, by_rank
        self._sums: dict[str, Tensor] = {}
        #: The sums after each step since the last :meth:`take`, and before it.
        self._after_each: list[Tensor] = []
        self.taken: list[Tensor] = []
        self._steps = 0
        self._before: dict[str, float] = {}  # sums of a restored window, until the first step gives type and device

    def add(self, output: StepOutput) -> None:
        """Add one step's losses: their sum as ``loss``, and each named one."""
        counted = output.counted()
        for name, loss in counted.items():
            # Not in place, and nothing else is kept: the loss may be memory of the job's own that its next step reuses.
            self._sums[name] = loss + self._sums.get(name, self._before.get(name, 0.0))
        self._after_each.append(self._sums["loss"])
        self._steps += 1

    def leave_out(self, steps: int) -> None:
        """Leave ``steps`` steps out of the means. Their losses were added as 0 because the steps were left out."""
        self._steps -= steps

    def state(self) -> dict[str, Any]:
        """Return the window for a checkpoint, equal on every rank.

        A collective and a host sync unless the window is empty.
        """
        # Before the first step there is what was restored.
        window: dict[str, float | Tensor] = {**self._before, **self._sums}
        if not window:
            return {"steps": 0, "sums": {}}
        sums = self._by_rank(window)
        return {"steps": self._steps, "sums": {name: sums[name].tolist() for name in window}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`. If it is of another number of ranks, rank 0 gets the sum of all."""
        self._steps = saved["steps"]
        # Only totals over the ranks are logged, so after a change of their number one rank may hold them all.
        for name, sums in saved["sums"].items():
            is_same = len(sums) == self._world_size
            self._before[name] = sums[self._rank] if is_same else float(self._rank == 0) * sum(sums)

    def take(self, figure: float) -> tuple[dict[str, float], list[float]]:
        """Return the means by name and the ``figure`` of each rank, and empty the window.

        Both are equal on every rank. One collective and one host sync. There are no means if every step was left out.
        """
        assert self._sums, "a step comes before each logging step"
        sums = self._by_rank({**self._sums, "": figure})  # no loss has that name
        means: dict[str, float] = {}
        if self._steps:
            means = {name: sums[name].sum().item() / self._steps for name in self._sums}
        self.taken, self._after_each = self._after_each, []
        self._sums, self._steps, self._before = {}, 0, {}
        return means, sums[""].tolist()


#: Name of a window's sums in a checkpoint, before the rank.
WINDOW = "log"
#: So many characters of a value are shown that is no number.
_MOST_SHOWN = 60


class LogWindow:
    """Sums and counts by tag. Ranks may log different tags: the mean is over those that did."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._tags: list[str] = []  #: the agreed tags, equal on all ranks and in this order
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self.latest: dict[str, Tensor | float] = {}  #: the last value of each tag; emptied by who reads it
        self._restored: Tensor | None = None
        self.taken: Mapping[str, Tensor | float] = {}  #: this rank's sums of the last :meth:`take`

    def add(self, tag: str, value: Tensor | float) -> None:
        """Add a value of one step. A tensor on a GPU is not read. Raises JobCodeError for what is no single number."""
        if isinstance(value, (str, bytes)) or (isinstance(value, Tensor) and value.numel() != 1):
            raise _not_a_number(tag, value)  # float() would take "3.5"
        if isinstance(value, Tensor) and not value.is_cpu:
            number: Tensor | float = value.detach().double().reshape(())  # to read it would wait for the GPU
        else:
            try:
                number = float(value.item() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, OverflowError):
                raise _not_a_number(tag, value) from None
        self.latest[tag] = number
        self._sums[tag] = self._sums.get(tag, 0.0) + number
        self._counts[tag] = self._counts.get(tag, 0) + 1

    def take(self) -> dict[str, float]:
        """Return the means, equal on every rank, and empty the window. A collective and a host sync."""
        total = self._total()
        # Tags are exchanged only if some are new on any rank.
        if total[-1]:
            self._agree()
            total = self._total()
        sums, counts = total[:-1].view(2, -1).tolist()
        self.taken, self._sums, self._counts, self._restored = self._sums, {}, {}, None
        # Ranks may log different tags, so each mean is over the values that there were.
        return {tag: sums[i] / counts[i] for i, tag in enumerate(self._tags) if counts[i]}

    @property
    def is_open(self) -> bool:
        """True if this rank has values that are not taken yet."""
        return bool(self._sums) or self._restored is not None

    def new(self) -> int:
        """Return the number of tags that other ranks may not know."""
        return len(self._sums.keys() - set(self._tags))

    def agreed_tags(self, new: int) -> list[str]:
        """Return the tags of all ranks, which :meth:`places` needs. Call it before :meth:`state`.

        ``new`` is the sum of :meth:`new` over the ranks. A collective where that is not 0.
        """
        if new:
            self._agree()
        return list(self._tags)

    def state(self) -> dict[str, Entry]:
        """Return this rank's part for a checkpoint."""
        return self.places(self._tags, self._table().cpu())

    def places(self, tags: Sequence[str], table: Tensor | None = None) -> dict[str, Entry]:
        """Return what a checkpoint's part is read into. On another number of ranks each gets the mean of all."""
        self._tags, self._restored = list(tags), None
        if not tags:
            return {}
        self._restored = table if table is not None else torch.zeros(2, len(tags), dtype=torch.float64)
        return {f"{WINDOW}/rank{self._rank}/window": PerRank(self._restored, averages=True)}

    def loaded(self) -> None:
        """Take the sums and counts over, once the places are filled."""
        if self._restored is not None:
            sums, counts = self._restored.tolist()
            self._sums = dict(zip(self._tags, sums, strict=True))
            self._counts = dict(zip(self._tags, counts, strict=True))

    def _table(self) -> Tensor:
        """Return sums and counts of the agreed tags, (2, tags) float64."""
        table = torch.zeros(2, len(self._tags), dtype=torch.float64, device=self._device)
        for index, tag in enumerate(self._tags):
            if tag in self._sums:
                table[0, index] = self._sums[tag]
                table[1, index] = self._counts[tag]
        return table

    def _total(self) -> Tensor:
        """Return the sum of all ranks' tables, flat. Its last number counts tags that are new on some rank."""
        new = torch.tensor([self.new()], dtype=torch.float64, device=self._device)
        return sum_across_ranks(torch.cat([self._table().flatten(), new]))

    def _agree(self) -> None:
        by_rank = gather_json(sorted(self._sums.keys() - set(self._tags)), self._device)
        self._tags += sorted({tag for tags in by_rank for tag in tags} - set(self._tags))


def _not_a_number(tag: str, value: object) -> JobCodeError:
    if isinstance(value, Tensor):
        what = f"has the shape {tuple(value.shape)} and the type {value.dtype}"
    else:
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        what = f"is {shown}, of type {type(value).__name__}"
    return JobCodeError(f"run.log: {tag} {what}; log single numbers")


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


def means_by_tag(values: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return ``values`` by tag. A name without a slash gets the prefix ``train/``."""
    return {name if "/" in name else f"train/{name}": value for name, value in values.items()}
