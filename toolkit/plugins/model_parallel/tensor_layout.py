"""tensor: ranks of a group compute each layer together. With more ranks there are copies of such groups.

The ranks of a group get the same samples and random numbers, so all that is not cut stays equal on them, bit for bit.
Where each rank sees only a part of a sequence, the gradients of what is not cut are parts of a sum, which is taken once
a step. Between the copies gradients are averaged after the backward pass, in a fixed order. With
``strategy.mesh.shards`` the parts are sharded over ranks as well (:class:`CutShards`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from toolkit.base import logs, torch_version
from toolkit.config import MeshConfig, StrategyConfig, TrainConfig, mesh_of
from toolkit.plugins.model_parallel.tensor_plan import CutLayers, TensorPlan, refuse_partial_gradients, tie, tied
from toolkit.ranks.collectives import sum_tensors
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, local
from toolkit.strategies import layout_options, refuse_gloo_on_gpus
from toolkit.strategies.layouts import (
    Layout,
    Shards,
    autocast,
    describe,
    device_mesh,
    distribute_weights,
    is_first,
    make_on_rank_0,
    share_of,
    submesh,
)
from toolkit.strategies.models import blocks, checkpoint_activations
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.protocol import ModelFactory, Strategy
from toolkit.strategies.spmd import Spmd

log = logs.get(__name__)


def build(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    """Return the strategy tensor. Raises ConfigError for a mesh that does not match the number of ranks."""
    torch_version.refuse_older([torch_version.TENSOR])
    refuse_gloo_on_gpus("tensor", session)
    sizes = mesh_of(config, session.world_size)
    plan = TensorPlan(config.tensor_plan, config.sequence_parallel)
    kind = TensorParallel if sizes.shards == 1 else CutShards
    return Spmd(session, kind(session, sizes, plan, **layout_options(config, train)), train)


class TensorParallel(Layout):
    """See :class:`~.Layout`."""

    passes_are_joint = True

    _model: nn.Module
    _mesh: DeviceMesh  #: of the group
    _cut: CutLayers
    _replicas: DeviceMesh | None

    def __init__(
        self, session: Session, sizes: MeshConfig, plan: TensorPlan, *, precision: str, compile: bool, recompute: int
    ) -> None:
        self.share = share_of(session, sizes)
        self.counts = is_first(session, sizes)
        self._session = session
        self._sizes = sizes
        self._plan = plan
        self._device = session.device
        self._precision = precision
        self._compile = compile
        self._recompute = recompute
        self._is_checked = False

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        """Cut the model. Raises ConfigError for a plan that does not fit the model."""
        mesh = device_mesh(self._session, self._sizes, ("tensor",))
        self._mesh, self._replicas = mesh["tensor"], submesh(mesh, "replicas")
        self._model = model = make_on_rank_0(make)
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        ties = tied(model)
        # The cut replaces parameters in the model; hand_out() below reads the whole ones.
        self._cut = self._plan.cut(model, self._mesh, trial)
        if any(tensor.is_meta for tensor in [*whole.values(), *model.buffers()]):
            model.to_empty(device=self._device)
            tie(model, ties)  # to_empty() made two of each shared one
        distribute_weights(whole, model.to(self._device), self._device, self._cut.mark_shards)
        if self._recompute:
            checkpoint_activations(model, self._recompute)
        for part in blocks(model) or [model] if self._compile else ():
            part.compile()
        log.info("a mesh of %s", describe(self._sizes))
        return model

    def verify_model(self) -> None:
        self._cut.compare(self._model, self._mesh)

    def mark_shards(self, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        return self._cut.mark_shards(entries)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def without_sync(self) -> AbstractContextManager[object]:
        """Change nothing: nothing is sent between the copies before :meth:`average`."""
        return nullcontext()

    @torch.no_grad()
    def average(self) -> None:
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        self._complete(parameters)
        # Only the first time, since it takes a collective for each whole parameter.
        if not self._is_checked:
            refuse_partial_gradients(self._model, self._mesh)
            self._is_checked = True
        if self._replicas is not None:
            group, count = self._replicas.get_group(), self._replicas.size()
            cut = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
            # Cut and whole ones apart: where parts differ in size, each rank would sum the whole ones in another order.
            for same in (cut, [parameter for parameter in parameters if not isinstance(parameter, DTensor)]):
                gradients = [local(parameter.grad) for parameter in same if parameter.grad is not None]
                sum_tensors(gradients, group, 1 / count)

    def _complete(self, parameters: list[nn.Parameter]) -> None:
        """Sum the partial gradients of layers that see a part of each sequence."""
        sums: dict[nn.Parameter, Tensor] = {}
        for parameter in parameters:
            gradient = parameter.grad
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                continue
            if gradient.placements == parameter.placements:
                continue
            if parameter.placements[0].is_replicate():
                sums[parameter] = local(gradient)
            else:  # an Embedding's: torch makes it whole
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        # One message for all of them.
        sum_tensors([*sums.values()], self._mesh.get_group())
        for parameter, total in sums.items():
            parameter.grad = DTensor.from_local(total, self._mesh, parameter.placements, run_check=False)  # type: ignore[attr-defined]

    def precision(self) -> AbstractContextManager[object]:
        return autocast(self._device, self._precision)


class CutShards(Shards):
    """Layers that are cut first, and a rank's parts of them sharded over the ranks of other groups."""

    _cut: CutLayers
    _group: DeviceMesh

    def __init__(self, session: Session, sizes: MeshConfig, plan: TensorPlan, **how: Any) -> None:
        """Take the plan. ``how`` is as for :class:`Shards`."""
        super().__init__(session, sizes, **how)
        self._plan, self._is_bf16 = plan, how["precision"] == "bf16"
        self._is_checked = False

    def cut(self, model: nn.Module, mesh: DeviceMesh, trial: TrialPass) -> None:
        self._group = mesh["tensor"]
        self._cut = self._plan.cut(model, self._group, trial)

    def verify_model(self) -> None:
        self._cut.compare(self._model, self._group, bf16=self._is_bf16)  # type: ignore[arg-type]
        self.reshard()

    def mark_shards(self, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        return self._cut.mark_shards(entries)

    def average(self) -> None:
        """Check the first gradients; the backward pass has averaged them."""
        if not self._is_checked:
            refuse_partial_gradients(self._model, self._group)  # type: ignore[arg-type]
            self._is_checked = True
