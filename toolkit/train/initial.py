"""The weights that a new run starts from, if `model.init_from` names any.

It is for fine-tuning, transfer, or a longer run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing, nearest
from toolkit.checkpoint import whole
from toolkit.checkpoint.folder import committed
from toolkit.config import ModelConfig
from toolkit.hang import activity
from toolkit.ranks.session import Session
from toolkit.strategies.protocol import ModelFactory

#: What wrappers put in front of a model's names: DataParallel and DDP, torch.compile, a trainer's attribute.
_PREFIXES = ("module.", "model.")
_INFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

log = logs.get(__name__)


def initialised(build: ModelFactory, config: ModelConfig, session: Session) -> nn.Module:
    """Return ``build()``, filled at a run's fresh start with the weights that ``config`` names.

    ``init_from`` names the source, ``init_weights`` which of its weights. A run that has a checkpoint ignores both,
    because its own weights follow. Every rank calls it and gets the same weights. Tensors match by name, wrappers'
    prefixes aside, and shape. The log says which did not match; these keep the values that ``build`` gave them. A model
    made without memory (on ``meta``) is not filled: sharding strategies hand rank 0's weights to all. Raises
    ConfigError when nothing matches or there is no such source, and CheckpointError when it cannot be read.
    Parameters that match ``config.freeze`` are frozen.
    """
    model = build()
    freeze(model, config.freeze)
    if torch.empty(()).device.type == "meta":
        return model
    if config.init_from is not None and not committed(session.run_dir / "checkpoints"):
        session.activity.phase = activity.LOADING
        from toolkit.train.init_from import read_on_all_ranks

        source = read_on_all_ranks(config.init_from, config.init_weights, session)
        match = fill(model, source.tensors)
        if not match.filled:
            raise ConfigError(f"model.init_from: nothing in {source.path} fits this model{match.misfits(every=True)}")
        if session.is_main:
            which = _WHICH[source.which]
            log.info("initial weights%s from %s: %d tensors%s", which, source.path, len(match.filled), match.misfits())
    return model


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose name matches one of ``patterns``.

    A module all of whose own parameters are frozen stays in evaluation mode, so that a BatchNorm keeps the statistics
    that its weights were trained with. Raises ConfigError for a pattern without a match, or when nothing is left.
    """
    if not patterns:
        return
    # A tied parameter is found under each of its names.
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            layers = [name.rpartition(".")[0] + ".*" for name in named]
            raise ConfigError(
                f"model.freeze: {pattern!r} matches no parameter of this model; {nearest(pattern, [*named, *layers])}"
                f"there are: {listing([*named], 12)}"
            )
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(f"model.freeze: {listing([*patterns])} leaves no parameter to train")
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()


_WHICH = {whole.AVERAGE: " (the moving average)", whole.RAW: " (raw)", None: ""}


@dataclass(frozen=True)
class Match:
    """The outcome of matching a model and a file by names and shapes."""

    filled: list[str]
    missing: list[str]
    extra: list[str]
    misshapen: list[str]

    def misfits(self, *, every: bool = False) -> str:
        """Return what did not match, as the end of a sentence. It lists a few names of each sort, or ``every`` one."""
        sorts = {
            "not in the file, and left as made": self.missing,
            "of another shape, and left as made": self.misshapen,
            "only in the file": self.extra,
        }
        most = 10**9 if every else 10
        shown = [f"; {sort} ({len(names)}): {listing(names, most)}" for sort, names in sorts.items() if names]
        return "".join(shown)


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> Match:
    """Copy into ``model``, in place and in its types, what fits in name and shape."""
    # Tensors only: extra state, which may be any object, is not copied.
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    names = pair(own, tensors)
    paired = set(names.values())
    match = Match([], [], [name for name in tensors if name not in paired], [])
    for name, value in own.items():
        if name not in names:
            match.missing.append(name)
            continue
        tensor = tensors[names[name]]
        if value.shape == tensor.shape:
            value.copy_(tensor)
            match.filled.append(name)
        else:
            match.misshapen.append(f"{name} {tuple(value.shape)}, in the file {tuple(tensor.shape)}")
    # A tied weight has several names in the model, but perhaps only one in the file.
    filled = {own[name].data_ptr() for name in match.filled}
    match.missing[:] = [name for name in match.missing if own[name].data_ptr() not in filled]
    return match


def pair(own: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Return the name among ``others`` that fits each of ``own``. It is the same one, wrappers' parts aside."""
    free = dict.fromkeys(others)
    pairs = {name: name for name in own if name in free}
    for name in pairs:
        del free[name]
    by_bare_name = {_bare(name): name for name in free}
    rest = [name for name in own if name not in pairs]
    return pairs | {name: by_bare_name[_bare(name)] for name in rest if _bare(name) in by_bare_name}


def _bare(name: str) -> str:
    for infix in _INFIXES:
        name = name.replace(infix, "")
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name
