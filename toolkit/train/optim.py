"""The optimizer, and its groups of parameters. Its learning rate is a function of the step.

Muon for hidden matrices and AdamW for the rest are one optimizer: one step, one state and one learning rate. Muon
(https://kellerjordan.github.io/posts/muon/) replaces a matrix's gradient by the nearest orthogonal matrix, so it needs
the whole gradient. Where a matrix is sharded over ranks, each rank gathers the gradient with its momentum and makes the
same step as the others, but keeps its own part only: weights and momenta stay sharded.
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Adam, AdamW, Optimizer

from toolkit.base import logs, torch_version
from toolkit.base.errors import ConfigError, did_you_mean, listing
from toolkit.config import OptimConfig
from toolkit.config.optim import is_class_path
from toolkit.constraints import choose
from toolkit.devices.kinds import CPU, CUDA, XPU
from toolkit.ranks.state import local
from toolkit.strategies.models import blocks

log = logs.get(__name__)

#: Devices for which torch has fused optimizers.
_FUSED = (CPU.type, CUDA.type, XPU.type)


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """Make the optimizer ``config.name`` over the parameters of ``model`` that are not frozen, in groups.

    It is fused (one kernel for all parameters) where torch has that: faster, and able to leave out a step without the
    host knowing. For sharded weights torch has no fused SGD. With ``config.groups`` or muon this is a collective,
    because a rank may have only some of the layers. Raises ConfigError.
    """
    groups = parameter_groups(config, model)
    if is_class_path(config.name):
        return _custom_optimizer(config, groups)
    kinds: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    if config.name == "muon":
        kinds["muon"] = partial(MuonAndAdamW, config=config)
    kind = choose("optim.name", config.name, kinds)
    # torch refuses ``fused`` for other devices, and for parameters that are not floating point.
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(parameter.device.type in _FUSED and parameter.is_floating_point() for parameter in parameters)
    if config.name == "sgd":
        fused = fused and not any(isinstance(parameter, DTensor) for parameter in parameters)
        momentum, nesterov = 0.9 if config.momentum is None else config.momentum, bool(config.nesterov)
        return kind(groups, config.lr, momentum, weight_decay=config.weight_decay, nesterov=nesterov, fused=fused)
    given: dict[str, Any] = {"betas": tuple(config.betas) or None, "eps": config.eps}
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"lr": config.lr, "weight_decay": config.weight_decay, "fused": fused}
    return kind(groups, **options)


def _custom_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Make an optimizer of the class at the path ``config.name``. Raises ConfigError."""
    # A closure that must be given means that the step computes the loss again, as LBFGS's does.
    kind = _imported(config.name)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"optim.name: {config.name} computes the loss again in its step, which no strategy can do")
    options: dict[str, Any] = {"lr": config.lr, **config.arguments}
    if config.weight_decay or "weight_decay" in inspect.signature(kind).parameters:
        options["weight_decay"] = config.weight_decay
    try:
        optimizer = kind(groups, **options)
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(f"optim.arguments: {config.name} does not take {given}: {error}") from error
    # torch takes any key in a group, and ignores one that the class does not know.
    valid = list(optimizer.defaults)
    for name in {name for group in groups for name in group} - {"params", *valid}:
        raise ConfigError(
            f"optim.groups: {config.name} has no setting {name!r} for a group; {did_you_mean(name, valid)}"
            f"it has: {listing(valid)}"
        )
    return optimizer


def _imported(path: str) -> type[Optimizer]:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module's code raises
        raise ConfigError(
            f"optim.name: {path}: the module {module_name} cannot be imported: {type(error).__name__}: {error}; "
            "correct the path, or install the package where the ranks run"
        ) from error
    # The error lists the module's optimizers, for a name that is misspelled.
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        there = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Optimizer)]
        what = "has no such class" if kind is None else f"has {name}, which is not a torch.optim.Optimizer"
        raise ConfigError(
            f"optim.name: {path}: the module {module_name} {what}; {did_you_mean(name, there)}"
            f"there are: {listing(there) or 'none'}"
        )
    return kind


_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def parameter_groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained parameters of ``model``, those with the same settings in one group.

    Parameters that are frozen are left out. A setting comes from the last pattern in ``config.groups`` that matches one
    of the parameter's names and has the setting. With muon each group says in ``muon`` whether it is for Muon or for
    AdamW. Raises ConfigError for a pattern that matches no parameter.
    """
    names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)  # a tied parameter has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    _refuse_unmatched(config.groups, [name for all_names in names.values() for name in all_names])
    spared = set() if config.decay_norms_and_biases else _norms_and_biases(model)
    by_depth = {} if config.layer_decay is None else _scales_by_depth(model, config.layer_decay)
    is_muon = config.name == "muon"
    matrices = _hidden_matrices(model) if is_muon else set()
    groups: dict[str, dict[str, Any]] = {}
    for parameter, all_names in names.items():
        if not parameter.requires_grad:
            continue
        # Defaults first: patterns override them, and a later pattern an earlier one.
        settings: dict[str, Any] = {"weight_decay": 0.0} if parameter in spared else {}
        if by_depth:
            settings["lr_scale"] = by_depth[parameter]
        if is_muon:
            settings["optimizer"] = "muon" if parameter in matrices else "adamw"
        for pattern, given in config.groups.items():
            if any(fnmatchcase(name, pattern) for name in all_names):
                settings |= given
        # From the config's words to what the optimizer understands.
        if "lr_scale" in settings:
            settings["lr"] = config.lr * settings.pop("lr_scale")
        if "optimizer" in settings:
            settings["muon"] = settings.pop("optimizer") == "muon"
            if settings["muon"] and parameter.ndim != 2:
                raise ConfigError(
                    f"optim.groups: {all_names[0]} has the shape {tuple(parameter.shape)}, and muon takes matrices; "
                    "let its pattern match those only, or leave out `optimizer: muon`"
                )
        group = groups.setdefault(repr(sorted(settings.items())), {"params": [], **settings})
        group["params"].append(parameter)
    # A stage of a pipeline may have nothing for Muon, but some rank must.
    if is_muon and not _of_all_ranks([key for key, group in groups.items() if group["muon"]]):
        raise ConfigError(
            "optim.name: muon is for weights of two dimensions, embeddings and the last layer aside, and this model "
            "trains none; use adamw"
        )
    # The log shows which parameters have which settings.
    for group in groups.values() if len(groups) > 1 else ():
        own = ", ".join(f"{setting} {value}" for setting, value in group.items() if setting != "params")
        shown = listing([names[parameter][0] for parameter in group["params"]], 5)
        log.info("optim: %d tensors with %s: %s", len(group["params"]), own or "no settings of their own", shown)
    return [*groups.values()]


def _scales_by_depth(model: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """Return each parameter's scale of the rate: ``decay`` to the power of its distance from the last layers.

    Parameters after the last block have 1, the last block ``decay``, the one before it ``decay ** 2``, and so on; what
    comes before the first block has the least (as in BEiT, https://arxiv.org/abs/2106.08254, appendix). A parameter
    between two blocks counts to the second. Raises ConfigError for a model without blocks.
    """
    depth_of = {parameter: depth for depth, block in enumerate(blocks(model), 1) for parameter in block.parameters()}
    if not depth_of:
        raise ConfigError(
            "optim.layer_decay: this model repeats no block (several modules of one class in a ModuleList or "
            "Sequential); give rates as optim.groups.PATTERN.lr_scale"
        )
    last, reached = max(depth_of.values()), 0
    scales: dict[nn.Parameter, float] = {}
    for parameter in model.parameters():
        reached = max(reached, depth_of.get(parameter, 0))
        beside = 0 if not reached else reached + 1
        scales[parameter] = decay ** (last + 1 - depth_of.get(parameter, beside))
    return scales


def _refuse_unmatched(patterns: Iterable[str], names: list[str]) -> None:
    if not patterns:
        return
    # A pattern may match on another stage of a pipeline only.
    everywhere = _of_all_ranks(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in everywhere):
            # Layers are suggested as well as parameters: ``head.*`` for ``haed.*``.
            valid = list(everywhere)
            for name in everywhere:
                parts = name.split(".")
                valid += [".".join(parts[:n]) + ".*" for n in range(1, len(parts))]
            raise ConfigError(
                f"optim.groups: {pattern!r} matches no parameter of this model; {did_you_mean(pattern, valid)}"
                f"there are: {listing(everywhere, 12)}"
            )


def _of_all_ranks(names: list[str]) -> list[str]:
    """Return the names that any rank has: the stages of a pipeline have different layers. All ranks call it."""
    if not dist.is_initialized():
        return names
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, names)
    return list(dict.fromkeys(name for own in by_rank for name in own))


def _by_module(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield each parameter by each of its names, with the module that has it."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{leaf}" if prefix else leaf, module, parameter


def _norms_and_biases(model: nn.Module) -> set[nn.Parameter]:
    """Return norms' parameters, biases, and all others with fewer than two dimensions: gains, temperatures."""
    return {
        parameter
        for name, module, parameter in _by_module(model)
        if name.rpartition(".")[2] == "bias" or parameter.ndim < 2 or isinstance(module, _NORMS)
    }


def _hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters for Muon: the weights of two dimensions, without embeddings and the head.

    This follows https://github.com/KellerJordan/Muon. The head is the last layer with such a weight, in the order in
    which the model names its layers. Every rank calls it.
    """
    by_layer: defaultdict[str, set[nn.Parameter]] = defaultdict(set)
    embeddings: set[nn.Parameter] = set()
    for name, module, parameter in _by_module(model):
        if isinstance(module, _EMBEDDINGS):
            embeddings.add(parameter)
        elif parameter.ndim == 2 and not isinstance(module, _NORMS):
            by_layer[name.rpartition(".")[0]].add(parameter)
    # All ranks must agree on the head, which a stage of a pipeline may not hold.
    layers = _of_all_ranks([*by_layer])
    head = by_layer.pop(layers[-1], set()) if layers else set()
    # A tied weight may be an embedding, or the head, under another name.
    return set().union(*by_layer.values()) - embeddings - head


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
            # torch wraps the step of each class that has been made: AdamW's would call this optimizer's hooks, too.
            inspect.unwrap(AdamW.step)(self)
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
