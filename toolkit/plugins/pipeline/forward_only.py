"""Forward passes through a pipeline, for evaluations: torch's schedules make none without a backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.plugins.pipeline.grid import Grid
from toolkit.plugins.pipeline.stage_module import StageModule


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
        """Return the outputs for each batch of inputs, on the last stage's rank. Batches may differ in size.

        Every rank of the pipeline calls it.
        """
        outputs: list[Tensor] = []
        received: Tensor | None = None
        ranks, count = self._grid.ranks, self._grid.count
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
                expected = self._stages[stage // self._grid.ranks].takes.empty(len(batches[number]), self._device)
            received = self._exchange(result, expected)
        return outputs

    def _turn(self, tick: int, batches: int) -> tuple[int, int] | None:
        """Return the stage and the micro-batch of this rank's turn at ``tick``, or None."""
        done = tick - self._grid.place
        if done < 0:
            return None
        # A round takes ``count`` ticks of this rank: for each of its stages, all micro-batches of the round.
        finished, inside = divmod(done, self._grid.count)
        lap, number = divmod(inside, self._grid.ranks)
        number += finished * self._grid.ranks
        return (lap * self._grid.ranks + self._grid.place, number) if number < batches else None

    def _exchange(self, result: Tensor | None, wanted: Tensor | None) -> Tensor | None:
        """Send ``result`` to the next rank and fill ``wanted`` from the previous one.

        After the last rank comes the first. Both go in one batch of operations, so that no order in which a backend
        makes them can block.
        """
        place, ranks = self._grid.place, self._grid.ranks
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
