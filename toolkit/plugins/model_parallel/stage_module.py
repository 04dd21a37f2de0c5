"""A rank's place in the grid of pipelines, and one of its stages as a module, as torch's pipelining wants it.

Evaluations need forward passes alone, and torch's schedules make none without a backward pass (:class:`ForwardOnly`). A
checkpoint stores a model whose tensors each lie whole on some ranks only (:func:`declare_everywhere`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.config import StrategyConfig, mesh_of
from toolkit.devices.accelerator import module_of
from toolkit.ranks.batch import Share
from toolkit.ranks.collectives import gather_objects
from toolkit.ranks.state import Entry, Replicated, Sharded


@dataclass(frozen=True)
class Grid:
    """The ranks as ``ranks`` x ``replicas``, seen from ``rank``. A rank's ``place`` is its number in its pipeline."""

    ranks: int  #: of a pipeline
    replicas: int
    rank: int
    stages_per_rank: int

    @classmethod
    def of(cls, config: StrategyConfig, rank: int, world_size: int) -> Grid:
        """Return the grid that the config asks for. Raises ConfigError if it does not match the number of ranks."""
        sizes = mesh_of(config, world_size)
        ranks = sizes.stages or 1
        interleaves = config.pipeline.schedule == "interleaved" and ranks > 1
        return cls(ranks, sizes.replicas or 1, rank, config.pipeline.stages_per_rank if interleaves else 1)

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.replicas

    @property
    def share(self) -> Share:
        """Return the part of the global batch, which all ranks of a pipeline hold."""
        return Share(self.rank % self.replicas, self.replicas)

    @property
    def first_replica(self) -> int:
        """Return the first of the ranks that hold the same stages as this one."""
        return self.pipeline_rank * self.replicas

    @property
    def is_first(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pipeline_rank == self.ranks - 1

    @property
    def stage_count(self) -> int:
        """Return the number of stages."""
        return self.ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> range:
        """Return the stages of ``rank``. With p ranks, place k has the stages k, k + p, k + 2p, ..."""
        return range(rank // self.replicas, self.stage_count, self.ranks)

    @property
    def stages(self) -> range:
        return self.stages_of(self.rank)


@dataclass(frozen=True)
class RowShape:
    """The shape of a tensor, without the number of samples in its first dimension."""

    row: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, samples: int, device: torch.device) -> Tensor:
        return torch.empty((samples, *self.row), dtype=self.dtype, device=device)


class LayerChain(nn.ModuleList):
    """Layers that are called one after the other; some are also given the model's input."""

    def __init__(self, layers: Sequence[nn.Module], take_input: Sequence[bool]) -> None:
        super().__init__(layers)
        self._take_input = tuple(take_input)

    def forward(self, hidden: Tensor, given: Tensor | None) -> Tensor:
        """Return the last layer's output; ``given`` is the model's input."""
        for layer, takes_input in zip(self, self._take_input, strict=True):
            hidden = layer(hidden, given) if takes_input else layer(hidden)
        return hidden


class StageModule(nn.Module):
    """One stage: its layers in a row. The first pass sets ``takes`` and ``gives``."""

    takes: RowShape
    gives: RowShape

    def __init__(
        self,
        number: int,
        chain: LayerChain,
        precision: Callable[[], AbstractContextManager[object]],
        device: torch.device,
    ) -> None:
        """``number`` sets its random numbers apart: stages are as many numbers apart as there are micro-batches."""
        super().__init__()
        self.chain = chain
        self._number, self._precision, self._device = number, precision, device
        self._seed = 0

    def begin(self, seed: int) -> None:
        """Begin a step; its micro-batches follow in the order of their numbers."""
        self._seed = seed + self._number

    def forward(self, inputs: Tensor, given: Tensor | None = None) -> Tensor:
        # A stage passes micro-batches in the order of their numbers, so a counter gives each its seed.
        if self.training:
            torch.default_generator.manual_seed(self._seed)
            if self._device.type != "cpu":
                module_of(self._device).manual_seed(self._seed)
            self._seed += 1
        with self._precision():
            outputs: Tensor = self.chain(inputs, given)
        self.takes = RowShape(tuple(inputs.shape[1:]), inputs.dtype)
        self.gives = RowShape(tuple(outputs.shape[1:]), outputs.dtype)
        return outputs


class ForwardOnly:
    """Passes batches through the stages of one pipeline; ``line`` is the group of its ranks.

    All ranks move in ticks. In each tick a rank passes one micro-batch through one of its stages and hands the result
    to the next rank, which takes it in the next tick. A round has as many micro-batches as there are ranks; these go
    through the first stage of each rank, then through the second.
    """

    def __init__(
        self, grid: Grid, line: dist.ProcessGroup, stages: Sequence[StageModule], device: torch.device
    ) -> None:
        self._grid, self._line, self._stages, self._device = grid, line, stages, device

    def run(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for each batch, of any size, on the last stage's rank. All ranks of the line call it."""
        outputs: list[Tensor] = []
        received: Tensor | None = None
        ranks, count = self._grid.ranks, self._grid.stage_count
        rounds = -(-len(batches) // ranks)
        for tick in range(rounds * count + ranks - 1):
            result: Tensor | None = None
            if (turn := self._turn(tick, len(batches))) is not None:
                stage, number = turn
                module = self._stages[stage // ranks]
                result = module(batches[number] if received is None else received, batches[number])
                if stage == count - 1:
                    outputs.append(result)
                    result = None
            # Every tick, also without a turn: the neighbors may send to this rank or wait for it.
            next_turn = self._turn(tick + 1, len(batches))
            expected: Tensor | None = None
            # The first stage receives nothing: its input is the batch itself.
            if next_turn is not None and next_turn[0] > 0:
                stage, number = next_turn
                expected = self._stages[stage // ranks].takes.empty(len(batches[number]), self._device)
            received = self._exchange(result, expected)
        return outputs

    def _turn(self, tick: int, batches: int) -> tuple[int, int] | None:
        """Return the stage and the micro-batch of this rank's turn at ``tick``, or None."""
        done = tick - self._grid.pipeline_rank
        if done < 0:
            return None
        # A round takes ``count`` ticks of this rank: for each of its stages, all micro-batches of the round.
        finished, inside = divmod(done, self._grid.stage_count)
        lap, number = divmod(inside, self._grid.ranks)
        number += finished * self._grid.ranks
        return (lap * self._grid.ranks + self._grid.pipeline_rank, number) if number < batches else None

    def _exchange(self, result: Tensor | None, wanted: Tensor | None) -> Tensor | None:
        """Send ``result`` to the next rank and fill ``wanted`` from the previous one; after the last comes the first.

        Both go in one batch of operations, so that no order in which a backend makes them can block.
        """
        place, ranks = self._grid.pipeline_rank, self._grid.ranks
        following = dist.get_global_rank(self._line, (place + 1) % ranks)
        previous = dist.get_global_rank(self._line, (place - 1) % ranks)
        operations = []
        if result is not None:
            operations.append(dist.P2POp(dist.isend, result.contiguous(), following, self._line))
        if wanted is not None:
            operations.append(dist.P2POp(dist.irecv, wanted, previous, self._line))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return wanted


@dataclass(frozen=True)
class _Description:
    """A rank's description of a value. It holds a small value itself, and of others the shape and the type."""

    value: Any
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


def declare_everywhere(own: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries that every rank declares, for values that only some have. A collective over all ranks.

    What all ranks have is `Replicated` as before. A tensor that some have is `Sharded` and whole on the first of them,
    which writes it. The others declare an empty part, also those that have the same tensor: after a load the first one
    must send it to these. All ranks hold a copy of a value that is not a tensor or has no dimensions.
    """
    whole = {name: entry for name, entry in own.items() if isinstance(entry, Replicated)}
    every = gather_objects({name: _describe(entry.value) for name, entry in whole.items()})
    shared: dict[str, Entry] = {}
    for name in dict.fromkeys(name for of_rank in every for name in of_rank):
        first = next(rank for rank, of_rank in enumerate(every) if name in of_rank)
        known: _Description = every[first][name]
        entry = whole.get(name)
        if entry is not None and (not known.shape or all(name in of_rank for of_rank in every)):
            shared[name] = entry
        elif not known.shape:  # small: every rank holds a copy
            shared[name] = Replicated(known.value)
        else:
            # The first rank that has the tensor writes it; the others declare an empty part.
            part = torch.empty((0, *known.shape[1:]), dtype=known.dtype)
            if entry is not None and first == dist.get_rank():
                assert isinstance(entry.value, Tensor)
                part = entry.value.detach()
            shared[name] = Sharded(part, known.shape, (0,) * len(known.shape))
    return {name: entry for name, entry in own.items() if name not in whole} | shared


def _describe(value: Any) -> _Description:
    if not isinstance(value, Tensor):
        return _Description(value, None, None)
    return _Description(None if value.ndim else value.detach().cpu(), tuple(value.shape), value.dtype)
