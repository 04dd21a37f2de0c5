"""The parameters that an optimizer gets, in groups with settings of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing, nearest
from toolkit.config import OptimConfig
from toolkit.strategies.blocks import blocks

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
