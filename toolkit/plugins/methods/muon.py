"""Muon for hidden matrices and AdamW for the rest, as one optimizer.

There is one step, one state and one learning rate. Muon (https://kellerjordan.github.io/posts/muon/) replaces a
matrix's gradient by the nearest orthogonal matrix, so it needs the whole gradient. Where a matrix is sharded over
ranks, each rank gathers the gradient with its momentum and makes the same step as the others, but keeps its own part
only: weights and momenta stay sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from toolkit.base import torch_version
from toolkit.base.errors import ConfigError
from toolkit.config import OptimConfig
from toolkit.ranks.state import local


class MuonAndAdamW(AdamW):
    """torch's Muon for the groups with ``muon: True``, and its AdamW for the others.

    ``options`` are AdamW's. Both have the same learning rate: Muon's steps are as long as AdamW's would be
    (``adjust_lr_fn: match_rms_adamw``, https://arxiv.org/abs/2502.16982), unless ``config.arguments`` says otherwise.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig, **options: Any) -> None:
        torch_version.refuse_older([torch_version.MUON])
        from torch.optim import Muon  # not in an older torch

        given: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", **config.arguments}
        given |= {"momentum": config.momentum, "nesterov": config.nesterov}
        given = {name: value for name, value in given.items() if value is not None}
        try:
            #: Made with a dummy matrix, because torch makes no optimizer without parameters. Its groups are set at each
            #: step.
            self._muon = Muon([torch.zeros(1, 1)], config.lr, config.weight_decay, **given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optim.arguments: torch's Muon does not take {given}: {error}") from error
        groups = [{**self._muon.defaults, **group} if group["muon"] else group for group in groups]
        super().__init__(groups, **options)
        self.defaults["muon"] = False  # for a group that is added later

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step; where ``found_inf`` is not 0 on the device, make none. ``closure`` is not supported."""
        assert closure is None, "no strategy has one"
        # AdamW steps over its own groups; it must not see Muon's.
        groups = self.param_groups
        matrices = [group for group in groups if group["muon"]]
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        # Fused AdamW leaves a bad step out by itself. Muon knows no ``found_inf``: its steps are undone on the device,
        # below, so that the host need not wait.
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        before: list[tuple[Tensor, Tensor]] = []
        if found_inf is not None:
            trained = [p for group in matrices for p in group["params"] if p.grad is not None]
            changed = [local(tensor) for p in trained for tensor in (p, self._momentum(p))]
            before = [(tensor, tensor.clone()) for tensor in changed]
        for group in matrices:
            whole = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
            self._step_whole({**group, "params": whole})
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    self._step_sharded(parameter, group)
        for tensor, copy in before:
            tensor.copy_(torch.where(found_inf.to(tensor.device) > 0, copy, tensor))  # type: ignore[union-attr]

    def _momentum(self, parameter: Tensor) -> Tensor:
        """Return the parameter's momentum. It is made if it is missing."""
        slots = self.state[parameter]
        if "momentum_buffer" not in slots:
            slots["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: Tensor = slots["momentum_buffer"]
        return momentum

    def _step_whole(self, group: dict[str, Any]) -> None:
        self._muon.param_groups, self._muon.state = [group], self.state
        self._muon.step()  # type: ignore[no-untyped-call]

    def _step_sharded(self, parameter: DTensor, group: dict[str, Any]) -> None:
        """Make one step for a matrix of which this rank has a part.

        Each rank updates the momentum of its part, which is exact. The result is gathered in bfloat16, in which torch's
        Muon makes it orthogonal. Muon then steps on a matrix that has this rank's weights, and zeros where the others
        have theirs.
        """
        assert parameter.grad is not None
        weights, gradient, momentum = local(parameter), local(parameter.grad), local(self._momentum(parameter))
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        # Gather the whole update on each rank.
        mesh, shape = parameter.device_mesh, parameter.shape
        sent = update.to(mesh.device_type, torch.bfloat16)  # for offloaded weights: NCCL takes no tensor in host memory
        parts = DTensor.from_local(sent, mesh, parameter.placements, shape=shape, stride=parameter.stride())
        # Of the weights only this rank's part is needed: decay acts on each weight by itself.
        whole = nn.Parameter(torch.zeros(shape, dtype=weights.dtype, device=sent.device))
        (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]  # DCP's: the place of our part
        own = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[own].copy_(weights)
        # The momentum is in the gradient already: Muon's own is off.
        whole.grad = parts.full_tensor().to(whole.dtype)
        self._step_whole({**group, "params": [whole], "momentum": 0.0, "nesterov": False})
        del self.state[whole]
        weights.copy_(whole[own])
