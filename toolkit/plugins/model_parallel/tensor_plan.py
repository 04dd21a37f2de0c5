"""`strategy.tensor_plan`, or the model's attribute of this name: which layers are cut over ranks, and how.

A plan maps names of layers to a style; in them ``*`` stands for anything between two dots (``blocks.*.attend``). The
styles are those of Megatron-LM (https://arxiv.org/abs/1909.08053), by torch's ``parallelize_module``:

* ``colwise``: a rank computes some of a Linear's outputs, and what follows works on these: whole heads, hidden units.
* ``colwise:3``: the same for a Linear whose outputs are three things in a row (q, k and v; gate and up are two): a rank
  computes some of each. It keeps these rows of the weight side by side; checkpoints have them where the model has them.
* ``rowwise``: a rank's Linear takes these as its inputs, and the sums of all ranks are added up; an Embedding has some
  of the rows. A ``colwise`` and a ``rowwise`` layer in a row cost one sum over the ranks each way.
* ``gathered``: like ``colwise``, but every rank gets all outputs: a model's last layer.
* ``sequence``: not cut. With `strategy.sequence_parallel` such a layer (a norm, dropout) works on a part of each
  sequence (https://arxiv.org/abs/2205.05198): inputs are (n, length, width), and between ``rowwise`` and ``colwise``
  each rank has its part of the length.

Without any plan, every plain Linear is ``gathered``: right whatever the model does with it, but slower. Where a plan
does not hold, the ranks would silently train something else, so the cut model is first compared with the whole one
(:class:`ReferenceActivations`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from toolkit.base import logs
from toolkit.base.errors import ConfigError, did_you_mean, listing
from toolkit.config.strategy import TENSOR_STYLES
from toolkit.constraints import tensor_style
from toolkit.ranks.collectives import broadcast_object
from toolkit.ranks.state import Entry, Sharded, local
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.priming import undone

#: Attributes with which models name their number of heads. No part of a layer may cut a head in two.
HEADS = (
    *("heads", "n_heads", "num_heads", "n_head", "nhead", "num_attention_heads"),
    *("kv_heads", "n_kv_heads", "num_key_value_heads"),
)
#: The dimension of a sequence's length in the layers' inputs: the last but one of (n, length, width) and (length,
#: width).
_LENGTH = -2

log = logs.get(__name__)


@dataclass(frozen=True)
class TensorPlan:
    """`strategy.tensor_plan`, empty for the model's own, and `strategy.sequence_parallel`."""

    layers: Mapping[str, str]
    sequence: bool = False

    def cut(self, model: nn.Module, mesh: DeviceMesh | None, trial: TrialPass) -> CutLayers:
        """Let the ranks of the one-dimensional ``mesh`` compute the layers together; parameters keep their names.

        The values in ``model`` (none, on ``meta``) are not sent. Rank 0, which has the whole model, first makes the
        ``trial`` with it. Raises ConfigError for a plan that does not fit the model, or the number of ranks.
        """
        assert mesh is not None, "the mesh of strategy.name tensor has this dimension, be it of one rank"
        styles = self._styles(model, mesh.size())
        for name, style in styles.items():
            _refuse(model, name, style, mesh.size())
        # parallelize_module makes new parameters: shared and frozen ones are noted here and restored below.
        ties, frozen = tied(model), [name for name, p in model.named_parameters() if not p.requires_grad]
        # The last moment at which rank 0 still has the whole model to compare with.
        cut = CutLayers(model, styles, trial, mesh.size(), sequence=self.sequence)
        for names in ties:
            if any(name in cut.fused for name in names):
                raise ConfigError(
                    f"strategy.tensor_plan: {listing(names)} are one parameter, and it cannot be cut in several parts "
                    "(colwise:N); leave the layer out of the plan"
                )
        for name, style in styles.items():
            layer = model.get_submodule(name)
            how = _torch_style(style.partition(":")[0], self.sequence, isinstance(layer, nn.Embedding))
            if how is not None:
                parallelize_module(layer, mesh, how, src_data_rank=None)
        tie(model, ties)
        for name in frozen:  # some of torch's new parameters would be trained
            model.get_parameter(name).requires_grad_(False)
        if self.sequence:
            # A layer in no pattern of the plan would silently get a part of each sequence and a part of its gradient.
            whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
            if whole:
                raise ConfigError(
                    f"strategy.sequence_parallel: {listing(whole, 5)} in no pattern of strategy.tensor_plan; add their "
                    "layers, norms as sequence, or set it to false"
                )
            model.register_forward_pre_hook(partial(_refuse_length, mesh.size()))
        shown = ", ".join(f"{count} {style}" for style, count in sorted(Counter(styles.values()).items()))
        log.info("%d ranks compute layers together: %s", mesh.size(), shown)
        return cut

    def _styles(self, model: nn.Module, ranks: int) -> dict[str, str]:
        """Return the style of each layer that is cut, in the model's order. Of two patterns the later one wins."""
        layers = self.layers or getattr(model, "tensor_plan", {})
        if not layers:
            # No subclass of Linear: torch's attention takes the weights of one without calling it.
            named = model.named_modules()
            gathered = {name: "gathered" for name, m in named if type(m) is nn.Linear and m.out_features >= ranks}
            if self.sequence or not gathered:
                without = "a model without a Linear layer that can be cut"
                what = "strategy.sequence_parallel" if self.sequence else without
                raise ConfigError(
                    f"strategy.tensor_plan: {what} needs a plan, and neither the config nor the model has one"
                )
            log.warning("without a strategy.tensor_plan the outputs of every Linear layer are gathered, which is slow")
            return gathered
        found: dict[str, str] = {}
        for pattern, style in layers.items():
            tensor_style(f"strategy.tensor_plan: {pattern}", style, TENSOR_STYLES)  # the model's own is not checked yet
            names = [name for name, _ in model.named_modules() if _matches(name, pattern)]
            if not names:
                there = _layers(model)
                raise ConfigError(
                    f"strategy.tensor_plan: no layer of this model is called {pattern}; {did_you_mean(pattern, there)}"
                    f"there are: {listing(there, 30)}"
                )
            found |= dict.fromkeys(names, style)
        return {name: found[name] for name, _ in model.named_modules() if name in found}


class CutLayers:
    """The layers that a group of ranks computes together. Made while ``model`` is whole."""

    def __init__(
        self, model: nn.Module, styles: Mapping[str, str], trial: TrialPass, ranks: int, *, sequence: bool
    ) -> None:
        self._styles, self._sequence = styles, sequence
        #: The parameters that are cut in several parts: the number of parts, and of ranks.
        self.fused: dict[str, tuple[int, int]] = {}
        dimensions: dict[str, int | None] = {}
        for name, style in styles.items():
            layer = model.get_submodule(name)
            kind, parts = tensor_style("strategy.tensor_plan", style, TENSOR_STYLES)
            if parts > 1:
                self.fused |= {f"{name}.{own}": (parts, ranks) for own, _ in layer.named_parameters(recurse=False)}
            # The dimension of the layer's input of which a rank gets a part; ReferenceActivations compares accordingly.
            takes_columns = kind == "rowwise" and isinstance(layer, nn.Linear)
            dimensions[name] = -1 if takes_columns else _LENGTH if sequence else None
        self._whole = ReferenceActivations(model, dimensions, trial)

    def compare(self, model: nn.Module, mesh: DeviceMesh, *, bf16: bool = False) -> None:
        """Raise ConfigError if the cut ``model`` computes other numbers than the whole one. All ranks raise it."""
        found = self._whole.compare(model, mesh, TOLERANCE_BF16 if bf16 else TOLERANCE)
        if found is None:
            return
        # The cause lies between the last layer known to agree and the first one that differs.
        layer, before = found
        named = [f"{name} ({self._styles[name]})" for name in [*before, layer] if name in self._styles]
        why = (
            " With strategy.sequence_parallel a rank has a part of each sequence there: positions from a buffer, sums "
            "and means over places need the whole; move them into a layer that the plan leaves out, or set it to false."
            if self._sequence
            else ""
        )
        raise ConfigError(
            f"strategy.tensor_plan: {mesh.size()} ranks that compute layers together get other numbers than the whole "
            f"model; the first difference is at {layer}, between {listing(named, 5)}. A Linear whose outputs are "
            "several things in a row is cut in each of them: colwise:3 for q, k and v, colwise:2 for gate and up. What "
            f"mixes the outputs of a colwise layer needs all of them: gathered.{why}"
        )

    def mark_shards(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Mark those of ``entries`` (``model/<parameter>``, ``optim/<parameter>/<slot>``) that lie in several parts."""
        marked = dict(entries)
        for name, entry in entries.items():
            # The parameter's name is all after the kind, without the slot where there is one.
            parameter = name.partition("/")[2]
            parts = self.fused.get(parameter) or self.fused.get(parameter.rpartition("/")[0])
            if parts and isinstance(entry, Sharded):
                marked[name] = replace(entry, fused=parts)
        return marked


def _torch_style(style: str, sequence: bool, embeds: bool) -> ParallelStyle | None:
    outside = Shard(_LENGTH) if sequence else Replicate()  # what a rank has between cut layers
    into = Replicate() if embeds else outside
    if style == "colwise":
        return ColwiseParallel(input_layouts=into)
    if style == "gathered":
        return ColwiseParallel(input_layouts=into, output_layouts=Replicate())
    if style == "rowwise":
        return RowwiseParallel(input_layouts=Replicate() if embeds else Shard(-1), output_layouts=outside)
    if style == "sequence":
        return SequenceParallel(sequence_dim=_LENGTH, use_local_output=True) if sequence else None
    raise ConfigError(f"strategy.tensor_plan: {style} has no counterpart in torch")


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _layers(model: nn.Module) -> list[str]:
    """Return the names of the modules that hold parameters, with ``*`` for numbers."""
    found = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in found))


def _refuse(model: nn.Module, name: str, style: str, ranks: int) -> None:
    """Raise ConfigError if this number of ranks cannot cut the layer ``name`` in this style."""
    layer = model.get_submodule(name)
    style, parts = tensor_style("strategy.tensor_plan", style, TENSOR_STYLES)
    if style == "sequence":
        return
    if not isinstance(layer, (nn.Linear, nn.Embedding)):
        raise ConfigError(
            f"strategy.tensor_plan: {name} is a {type(layer).__name__}, and {style} is for Linear and Embedding; "
            "of other layers only sequence is known"
        )
    # The width of the dimension that is cut.
    rowwise = style == "rowwise"
    if isinstance(layer, nn.Linear):
        width, what = (layer.in_features, "inputs") if rowwise else (layer.out_features, "outputs")
    else:
        width, what = (layer.num_embeddings, "rows") if rowwise else (layer.embedding_dim, "outputs")
    if parts > 1 and (not isinstance(layer, nn.Linear) or width % parts):
        raise ConfigError(
            f"strategy.tensor_plan: {name} does not have outputs in {parts} equal parts, for colwise:{parts} "
            f"({type(layer).__name__}, {width})"
        )
    width //= parts
    # Outputs that are gathered, and an Embedding's rows, may be shared unevenly.
    may_be_uneven = style == "gathered" or (rowwise and isinstance(layer, nn.Embedding))
    if width < ranks or (width % ranks and not may_be_uneven):
        raise ConfigError(
            f"strategy.mesh.tensor: {ranks} ranks cannot share the {width} {what} of {name} evenly; use "
            "a number of ranks that divides it"
        )
    # No part may cut a head in two.
    parent = name.rpartition(".")[0]
    for attribute in HEADS if style in ("colwise", "rowwise") else ():
        heads = getattr(model.get_submodule(parent), attribute, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(
                f"strategy.mesh.tensor: {ranks} ranks cannot share the {heads} heads of {parent or 'the model'} "
                f"({attribute}); use a number of ranks that divides it"
            )


def _refuse_length(ranks: int, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    length = inputs[0].shape[1]
    if length % ranks:
        raise ConfigError(
            f"strategy.sequence_parallel: {ranks} ranks cannot share sequences of {length} evenly; use a length that "
            "their number divides, or set it to false"
        )


@torch.no_grad()
def refuse_partial_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ConfigError for a whole parameter whose gradients differ between the ranks of a group.

    It stands between a colwise and a rowwise layer and sees some of the hidden units: the copies would drift apart.
    Gradients that are only rounding, compared with the model's largest, may differ.
    """
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    largest = max((gradient.abs().max().item() for gradient in gradients if gradient.numel()), default=0.0)
    for name, parameter in model.named_parameters():
        if parameter.grad is None or _is_sharded(parameter):
            continue
        # max(g) + max(-g) over the ranks is the largest difference between their gradients: one collective a parameter.
        mine = local(parameter.grad).to(mesh.device_type)
        both = torch.stack([mine, -mine])
        dist.all_reduce(both, dist.ReduceOp.MAX, mesh.get_group())
        if mine.numel() and both.sum(0).max().item() > 1e-3 * max(mine.abs().max().item(), 1e-3 * largest):
            raise ConfigError(
                f"strategy.tensor_plan: {name} is whole on each rank but sees a part of what it works on, for it "
                "stands between layers that are cut; leave these layers out of the plan, or gather before it"
            )


def _is_sharded(parameter: Tensor) -> bool:
    """True if it belongs to a layer in the plan, by its mesh. Other parameters have no mesh, or the data's."""
    return isinstance(parameter, DTensor) and "tensor" in (parameter.device_mesh.mesh_dim_names or ())


def tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names: dict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [found for found in names.values() if len(found) > 1]


def tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Make the parameters of each group of names one again. Raises ConfigError if the layers are cut in two ways."""
    for names in ties:
        first, *others = (model.get_parameter(name) for name in names)
        if any(getattr(other, "placements", None) != getattr(first, "placements", None) for other in others):
            raise ConfigError(
                f"strategy.tensor_plan: {listing(names)} are one parameter and would be cut in two ways; cut both by "
                "rows (an Embedding rowwise, a Linear colwise or gathered), or neither"
            )
        for name in names[1:]:
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent).register_parameter(leaf, first)


#: The number of values of a layer's input that are compared, the same ones of the whole tensor on every rank.
SAMPLED = 256
#: How much two passes may differ by rounding, relative to their values. In bf16 each layer adds half a percent.
TOLERANCE, TOLERANCE_BF16 = 0.01, 0.1
OUTPUT = "the model's output"


class ReferenceActivations:
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
        """Return the first layer whose input differs from the whole model's, and those since the last equal one.

        None if there is no difference. The result is the same on all ranks, which all call it.
        """
        group, ranks, here = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        # Rank 0 says which calls it has recorded; every rank then samples its part of the same places.
        seen = {name: shape for name, (shape, _) in self._seen.items()}
        shapes: dict[str, tuple[int, ...]] = broadcast_object(0, seen)
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
        return broadcast_object(0, difference)  # type: ignore[no-any-return]

    def _first_difference(self, every: Tensor, tolerance: float) -> tuple[str, list[str]] | None:
        """Return what :meth:`compare` does. ``every`` is (ranks, layers, SAMPLED); NaN: the rank lacks the value."""
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
    """Return (SAMPLED,) values of a tensor of ``shape``, of which ``tensor`` may be part ``here`` along ``cut``.

    NaN stands for values that lie on another rank, and for all of a tensor that is not such a part.
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
