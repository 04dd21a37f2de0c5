"""The order in which a rank makes the passes of a step: torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, schedules

from toolkit.config import choose
from toolkit.plugins.model_parallel.stage_module import Grid, StageModule
from toolkit.ranks import older_torch


def build_schedule(
    name: str,
    grid: Grid,
    line: dist.ProcessGroup,
    modules: Sequence[StageModule],
    device: torch.device,
    micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Return the schedule ``name`` for ``modules``, this rank's stages.

    ``line`` is the group of the pipeline's ranks. ``loss(outputs, target)`` is called on the rank of the last stage. It
    divides by the samples of the global batch: torch scales no gradients.
    """
    if not hasattr(schedules, "_wait_batch_p2p"):  # torch < 2.8
        schedules._batch_p2p = _Transfers.start  # type: ignore[assignment]  # as torch < 2.8 has it
    stages = [
        PipelineStage(module, stage, grid.count, device, group=line)
        for module, stage in zip(modules, grid.stages, strict=True)
    ]
    unscaled = older_torch.known(ScheduleGPipe, scale_grads=False)  # torch 2.6 scales none
    if len(stages) > 1:
        return ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss, **unscaled)  # type: ignore[arg-type]
    # A single rank makes the same steps with interleaved as with 1f1b.
    kinds: dict[str, Callable[..., Any]]
    kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": Schedule1F1B}
    kind = choose("strategy.pipeline.schedule", name, kinds)
    return kind(stages[0], micro_batches, loss_fn=loss, **unscaled)


class _Transfers:
    """All transfers of a batch as one: torch < 2.8 keeps the last one only.

    Over gloo each tensor is a transfer of its own. A send that nobody keeps is dropped before it is done, and the ranks
    wait for each other for ever.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    @classmethod
    def start(cls, transfers: list[dist.P2POp], desc: str | None = None) -> _Transfers | None:
        """Start a batch, as torch's ``_batch_p2p()``. Return None if it is empty."""
        return cls(dist.batch_isend_irecv(transfers)) if transfers else None

    def wait(self) -> None:
        for work in self._works:
            work.wait()
