"""Compares a model that is cut over ranks with the whole model.

That is done before the first step. A plan assumes something about the model. Where that does not hold, the ranks would
silently train something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from toolkit.base import logs
from toolkit.ranks.collectives import from_rank
from toolkit.strategies.layouts import local
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.priming import undone

#: The number of values of a layer's input that are compared, the same ones of the whole tensor on every rank.
SAMPLED = 256
#: How much two passes may differ by rounding, relative to their values. In bf16 each layer adds half a percent.
TOLERANCE, TOLERANCE_BF16 = 0.01, 0.1
OUTPUT = "the model's output"

log = logs.get(__name__)


class WholePass:
    """The layers' inputs in a pass of the whole model. The cut model's are compared with them.

    ``cut`` has the dimension of each layer's input of which a rank of the group has a part; None: it has the whole.
    Only rank 0 has the whole model. Every rank makes this object before the model is cut, and calls :meth:`compare`
    after.
    """

    def __init__(self, model: nn.Module, cut: Mapping[str, int | None], trial: TrialPass) -> None:
        self._cut, self._trial = cut, trial
        self._seen: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        if dist.get_rank() == 0:
            try:
                _pass(model, cut, trial, self._keep)
            except Exception as error:  # a kernel that only a GPU has, say
                self._seen.clear()
                log.warning("the whole model cannot be run on this host, and is not compared with the cut one: "
                            "%s: %s", type(error).__name__, error)  # fmt: skip

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._seen[name] = tuple(tensor.shape), _some(tensor, tuple(tensor.shape), None, 0)

    def compare(self, model: nn.Module, mesh: DeviceMesh, tolerance: float) -> tuple[str, list[str]] | None:
        """Return the first layer whose input differs from the whole model's, or None.

        With it come the layers called since the last one whose input was equal. The result is the same on all ranks,
        which all call it.
        """
        group, ranks, here = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        # Rank 0 says which calls it has recorded; every rank then samples its part of the same places.
        seen = {name: shape for name, (shape, _) in self._seen.items()}
        shapes: dict[str, tuple[int, ...]] = from_rank(0, seen)
        sampled: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> None:
            layer = name.partition("#")[0]
            if name in shapes:
                sampled[name] = _some(local(tensor), shapes[name], self._cut.get(layer), here)

        _pass(model, self._cut, self._trial, keep)
        # Rank 0 gets the samples of all ranks of its group and compares them with those of the whole model.
        missing = torch.full((SAMPLED,), torch.nan)
        rows = torch.stack([sampled.get(name, missing) for name in shapes] or [torch.zeros(0)])
        every = rows.new_empty((ranks, *rows.shape)).to(self._trial.device)
        dist.all_gather_into_tensor(every.view(-1), rows.to(every.device).view(-1), group)
        difference = self._first_difference(every.cpu(), tolerance) if dist.get_rank() == 0 else None
        return from_rank(0, difference)  # type: ignore[no-any-return]

    def _first_difference(self, every: Tensor, tolerance: float) -> tuple[str, list[str]] | None:
        """Return what :meth:`compare` does, on rank 0.

        ``every`` is (ranks, layers, SAMPLED); NaN: the rank lacks the value.
        """
        since: list[str] = []
        for number, (name, (_, whole)) in enumerate(self._seen.items()):
            parts = every[:, number]
            known = ~parts.isnan()
            # The distance of each rank's values from the whole model's, relative to the length of these.
            wrong = torch.where(known, parts - whole, 0.0)
            lengths = whole.where(known, 0.0).norm(dim=1).clamp(min=1e-12)
            farthest = (wrong.norm(dim=1) / lengths).max().item()
            layer = name.partition("#")[0]
            if farthest > tolerance and wrong.abs().max().item() > 1e-6:
                return layer, since
            if known.any():
                since.clear()
            since.append(layer)
        return None


@torch.no_grad()
def _pass(model: nn.Module, layers: Collection[str], trial: TrialPass, keep: Callable[[str, Tensor], None]) -> None:
    """Make a pass in evaluation mode. ``keep`` gets the input of each call of ``layers``, and the output."""
    calls: Counter[str] = Counter()

    def before(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            keep(f"{name}#{calls[name]}", args[0])
        calls[name] += 1

    # Before the hooks of torch's parallel styles, which communicate.
    hooks = [model.get_submodule(n).register_forward_pre_hook(partial(before, n), prepend=True) for n in layers]
    try:
        with undone(model), torch.compiler.set_stance("force_eager"):
            output = trial(model.eval())
        if isinstance(output, Tensor):
            keep(OUTPUT, output)
    finally:
        for hook in hooks:
            hook.remove()


def _some(tensor: Tensor, shape: tuple[int, ...], cut: int | None, here: int) -> Tensor:
    """Return (SAMPLED,) values of a tensor of ``shape``.

    ``tensor`` may be part ``here`` of it along dimension ``cut``. NaN stands for values that lie on another rank, and
    for all of a tensor that is not such a part.
    """
    # Seed and sizes are those of the whole tensor, so every rank draws the same places.
    draw = torch.Generator().manual_seed(len(shape))
    places = [torch.randint(size, (SAMPLED,), generator=draw) for size in shape]
    values = torch.full((SAMPLED,), torch.nan)
    there = torch.ones(SAMPLED, dtype=torch.bool)
    sizes = [*shape]
    # A cut tensor: shift the places into this rank's part, and note which of them lie in it.
    if tuple(tensor.shape) != shape and cut is not None and -len(shape) <= cut:
        sizes[cut] = tensor.shape[cut] if tensor.ndim == len(shape) else 0
        start, stop = here * sizes[cut], (here + 1) * sizes[cut]
        there = (places[cut] >= start) & (places[cut] < stop)
        places[cut] = places[cut] - start
    if tuple(tensor.shape) == tuple(sizes):
        indices = tuple(place[there].to(tensor.device) for place in places)
        values[there] = tensor.detach()[indices].float().cpu()
    return values
