"""Puts the layers of a rank's stages on its device, with rank 0's first weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.base.errors import ConfigError
from toolkit.plugins.model_parallel import stages
from toolkit.plugins.model_parallel.stage_module import Grid
from toolkit.plugins.model_parallel.stages import StagePlan
from toolkit.ranks.collectives import from_rank
from toolkit.strategies.layouts.mesh import make_on_rank_0
from toolkit.strategies.models import checkpoint_activations, in_training, refuse_extra_state
from toolkit.strategies.protocol import ModelFactory


def place(
    make: ModelFactory, inputs: Tensor, grid: Grid, device: torch.device, *, split: list[str], recompute: int
) -> tuple[nn.Module, StagePlan]:
    """Return the model with this rank's layers only, and the plan of the stages.

    The layers are on ``device``, with rank 0's weights: only rank 0 makes the model with values. Every rank calls it.
    ``inputs`` and ``split``: see :func:`.stages.plan`. Raises ConfigError, on all ranks, for a model that cannot be
    cut.
    """
    model = make_on_rank_0(make)
    refuse_extra_state(model, "a pipeline")
    if recompute:
        checkpoint_activations(model, recompute)
    here = next(model.parameters()).device  # the inputs may be on the GPU already
    # Only rank 0's model has values, so it plans for all. Its refusal is raised on every rank.
    plan: StagePlan | None = None
    refusal = ""
    if dist.get_rank() == 0:
        try:
            plan = stages.plan(model, inputs.to(here), grid.count, split)
        except ConfigError as error:
            refusal = str(error)
    plan, refusal = from_rank(0, (plan, refusal))
    if plan is None:
        raise ConfigError(refusal)
    # Rank 0 keeps all tensors to send them; every rank, rank 0 as well, then deletes the layers of other ranks.
    whole = stages.tensors(model, plan.kept(range(grid.count))) if dist.get_rank() == 0 else {}
    stages.keep(model, plan.kept(grid.stages))
    is_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model = in_training(model.to_empty(device=device) if is_meta else model.to(device))
    _hand_out(whole, model, plan, grid, device)
    return model, plan


def _hand_out(whole: Mapping[str, Tensor], model: nn.Module, plan: StagePlan, grid: Grid, device: torch.device) -> None:
    """Send every other rank the tensors of its layers from rank 0. One is sent at a time."""
    if dist.get_rank():
        # Rank 0 sends in the same order, the model's.
        for tensor in stages.tensors(model, plan.kept(grid.stages)).values():
            arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.recv(arrived, 0)
            tensor.copy_(arrived)
        return
    for rank in range(1, dist.get_world_size()):
        layers = plan.kept(grid.stages_of(rank))
        for name, tensor in whole.items():
            if stages.owner(name, layers) is not None:
                dist.send(tensor.to(device).contiguous(), rank)
