"""The optimizer. Its learning rate is a function of the step: there is no scheduler whose state to save.

It gets the parameters in groups with settings of their own.
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Adam, AdamW, Optimizer

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing, nearest
from toolkit.config import OptimConfig
from toolkit.config.optim import is_path
from toolkit.devices.kinds import CPU, CUDA, XPU
from toolkit.limits import choose
from toolkit.strategies.models import blocks

#: Devices for which torch has fused optimizers.
_FUSED = (CPU.type, CUDA.type, XPU.type)


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """Make the optimizer ``config.name`` over the parameters of ``model`` that are not frozen, in groups.

    It is fused (one kernel for all parameters) where torch has that: faster, and able to leave out a step without the
    host knowing. For sharded weights torch has no fused SGD. With ``config.groups`` or muon this is a collective,
    because a rank may have only some of the layers. Raises ConfigError.
    """
    groups = parameter_groups(config, model)
    if is_path(config.name):
        return _custom_optimizer(config, groups)
    kinds: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    if config.name == "muon":
        from toolkit.plugins.methods.muon import MuonAndAdamW

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
            f"optim.groups: {config.name} has no setting {name!r} for a group; {nearest(name, valid)}"
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
        what = "has no such class" if kind is None else f"has {name}, and it is no torch.optim.Optimizer"
        raise ConfigError(
            f"optim.name: {path}: the module {module_name} {what}; {nearest(name, there)}"
            f"there are: {listing(there) or 'none'}"
        )
    return kind


_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

log = logs.get(__name__)


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
    """Return each parameter's scale of the rate, by its distance from the last layers.

    It is ``decay`` to the power of that distance. Parameters after the last block have 1, the last block ``decay``, the
    one before it ``decay ** 2``, and so on; what comes before the first block has the least (as in BEiT,
    https://arxiv.org/abs/2106.08254, appendix). A parameter between two blocks counts to the second. Raises ConfigError
    for a model without blocks.
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
                f"optim.groups: {pattern!r} matches no parameter of this model; {nearest(pattern, valid)}"
                f"there are: {listing(everywhere, 12)}"
            )


def _of_all_ranks(names: list[str]) -> list[str]:
    """Return the names that any rank has, in the model's order; all ranks call it.

    The stages of a pipeline have different layers.
    """
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
    spared: set[nn.Parameter] = set()
    for name, module, parameter in _by_module(model):
        is_bias = name.rpartition(".")[2] == "bias"
        if is_bias or parameter.ndim < 2 or isinstance(module, _NORMS):
            spared.add(parameter)
    return spared


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
