"""What the toolkit has by name, and what other packages may add: seven kinds, and nothing else.

The toolkit's own are in the tables below. Another package names its own as entry points, by which they are found
without an import: the group is ``toolkit.KIND``, the name is the word that a user writes, and the value is a module or
``module:attribute``. A package can add names, and take none that is there already. docs/plugins.md has an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias

from toolkit.base import logs
from toolkit.base.errors import ConfigError, PluginError

log = logs.get(__name__)
#: The version of what a strategy and a tracker must be. One of a package that was written for another is refused.
INTERFACE = 1

#: * ``commands``: a module with a docstring for the help, ``EXAMPLES``, ``add_arguments(parser)`` and ``run(args)``.
#: * ``strategies``: for a value of ``strategy.name``, a :class:`StrategySpec`, in a module that imports no torch.
#: * ``datasets``: for a value of ``data.name``, a :class:`toolkit.config.dataset_catalog.Entry`.
#: * ``trackers``: for a word after `toolkit upload RUN`, a class, see `toolkit.plugins.trackers`.
#: * ``backends``: for a value of ``dist.backend``, see :class:`toolkit.ranks.device.Backend`.
#: * ``devices``: for torch's name of a type of device, a :class:`toolkit.devices.kinds.DeviceKind`.
#: * ``adapters``: a module: a script that calls something of it has the toolkit in its loop, as by `toolkit.start()`.
Kind: TypeAlias = Literal["commands", "strategies", "datasets", "trackers", "backends", "devices", "adapters"]


class StrategySpec(NamedTuple):
    """A strategy, and what holds of it for the checks of a config. The defaults are those of the job's own step."""

    #: ``module:function``, called as ``build(config, session, train)``: a :class:`toolkit.strategies.protocol.Strategy`
    build: str
    checks: str = "toolkit.config.validation:StrategyChecks"  #: a subclass of this: what else it refuses in a config
    #: its state has the same names and values as that of the others with this trait (local_sgd: at the end of a round,
    #: with the mean); another of them may continue a run, to rounding. What it alone keeps is named `update/...`
    same_state: bool = False
    whole_update: bool = False  #: it does everything that ``train:`` asks for between gradients and weights
    sync_batch_norm: bool = False  #: BatchNorm may use all ranks' samples
    sharded: bool = False  #: a rank holds a part of each weight, or of many
    local_stopwatch: bool = False  #: its ranks compute a step up to its backward pass before they wait for each other
    #: what it can do that most others cannot: the keys ``cpu_offload``, ``prefetch_blocks``, ``tensor_plan``,
    #: ``sequence_parallel``, ``find_unused``, ``compression`` (``bf16_compression``: in bf16 alone) and
    #: ``channels_last``, and the precision ``fp16``
    options: tuple[str, ...] = ()
    mesh: tuple[str, ...] = ("replicas",)  #: the dimensions of its mesh; the first null one takes the ranks left
    interface: int = INTERFACE


_P, _METHODS, _CUT = "toolkit.plugins", "toolkit.plugins.methods", "toolkit.plugins.model_parallel"
#: All ranks make the same steps.
_STEPS = StrategySpec("toolkit.strategies:build_spmd", same_state=True, whole_update=True)
_OPTIONS, _GATHERS = ("find_unused", "compression", "channels_last", "fp16"), ("prefetch_blocks", "bf16_compression")
_SHARDS = _STEPS._replace(sync_batch_norm=True, sharded=True, options=_GATHERS, mesh=("shards", "replicas"))
STRATEGIES = {
    "ddp": _STEPS._replace(sync_batch_norm=True, local_stopwatch=True, options=_OPTIONS),
    "fsdp": _SHARDS._replace(options=(*_GATHERS, "cpu_offload")),
    "zero": _SHARDS,
    "dp": _STEPS,
    # Never built from here: train/job.py makes a Custom of the job's own parts.
    "custom": StrategySpec("toolkit.strategies:build_spmd", "toolkit.config.validation:CustomChecks"),
    "auto": _STEPS._replace(
        build=f"{_METHODS}.auto:build", checks=f"{_METHODS}.checks:AutoChecks", sync_batch_norm=True
    ),
    "local_sgd": StrategySpec(f"{_METHODS}.local_sgd:build", f"{_METHODS}.checks:LocalSgdChecks", same_state=True),
    "parameter_server": StrategySpec(
        f"{_METHODS}.parameter_server.servers:build", f"{_METHODS}.checks:ParameterServerChecks", same_state=True
    ),
    "pipeline": _STEPS._replace(
        build=f"{_CUT}.pipeline:build", checks=f"{_CUT}.checks:PipelineChecks", mesh=("stages", "replicas")
    ),
    "tensor": _STEPS._replace(
        build=f"{_CUT}.tensor_layout:build",
        checks=f"{_CUT}.checks:TensorChecks",
        sharded=True,
        options=("tensor_plan", "sequence_parallel"),
        mesh=("tensor", "replicas", "shards"),
    ),
}
_COMMANDS = """cancel checkpoint compare completion data doctor evaluate exec export follow gc generate logs new
    placement profile report resume resume-check rm run serve shell site stacks status stop submit supervise sweep
    tensorboard upload watch why"""
_OF_FILES = ("mnist", "fashion_mnist", "cifar10", "image_folder", "text", "tokens")
BUILT_IN: Mapping[Kind, Mapping[str, str]] = {
    "commands": {name: f"toolkit.cli.commands.{name.replace('-', '_')}" for name in _COMMANDS.split()},
    "strategies": {name: kind.build for name, kind in STRATEGIES.items()},
    "datasets": {name: f"toolkit.config.dataset_catalog:{name.upper()}" for name in ("digits", "synthetic")}
    | {name: f"{_P}.formats.dataset_catalog:{name.upper()}" for name in _OF_FILES},
    "trackers": {name: f"{_P}.trackers.{name}:{name.capitalize()}" for name in ("mlflow", "wandb")},
    "backends": {**dict.fromkeys(("auto", "nccl", "xccl", "gloo"), "torch.distributed"), "mpi": f"{_P}.mpi.backend"},
    "devices": {},
    "adapters": {"integrations": f"{_P}.integrations"},
}


@cache
def _of_others() -> Mapping[Kind, Mapping[str, str]]:
    """Return what other packages add. The search takes some hundredths of a second."""
    from importlib.metadata import entry_points

    found: dict[Kind, dict[str, str]] = {kind: {} for kind in BUILT_IN}
    every = entry_points()
    for kind, names in found.items():
        for entry in sorted(every.select(group=f"toolkit.{kind}")):
            if entry.name in BUILT_IN[kind] or entry.name in names:
                log.warning("%s of toolkit.%s is left out: %r is taken", entry.value, kind, entry.name)
            else:
                names[entry.name] = entry.value
    return found


def names(kind: Kind) -> dict[str, str]:
    """Return all that there is of this kind: by name, where it is. The toolkit's own comes first."""
    return {**BUILT_IN[kind], **_of_others()[kind]}


def where(kind: Kind, name: str) -> str | None:
    """Return where this is; None if there is none. For one of its own the toolkit searches no installed package."""
    return BUILT_IN[kind].get(name) or _of_others()[kind].get(name)


def find(kind: Kind, name: str) -> Any:
    """Return the module or the attribute; None if there is none of this name.

    Raises PluginError if it cannot be loaded, is of another type, or was written for another version of the interface;
    OSError where a disk is away.
    """
    if (path := where(kind, name)) is None:
        return None
    found = load_part(kind, name, path)
    if kind == "strategies" and not isinstance(found, StrategySpec):
        raise PluginError(f"{path} is a {type(found).__name__}, and has to be a toolkit.registry.StrategySpec")
    if (version := getattr(found, "interface", INTERFACE)) != INTERFACE:
        raise PluginError(f"{path} was written for version {version} of toolkit.{kind}; this is version {INTERFACE}")
    return found


def load_part(kind: Kind, name: str, path: str) -> Any:
    """Return what is at ``path``, which ``name`` gives: a module or ``module:attribute``. Raises as :func:`find`."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute) if attribute else import_module(module)
    except (OSError, ConfigError):  # a refusal says what to do
        raise
    except (Exception, SystemExit) as error:  # it may be other people's code
        why = f"{type(error).__name__}: {error}"
        raise PluginError(f"{name} of {kind} needs {path}, which cannot be loaded: {why}") from error


def strategy(name: str) -> StrategySpec:
    """Return what is known of a strategy; of an unknown one that of a job's own step. Raises PluginError."""
    return STRATEGIES.get(name) or find("strategies", name) or STRATEGIES["custom"]


def with_trait(trait: str) -> tuple[str, ...]:
    """Return the strategies that have this trait or option, those of other packages last."""
    able = []
    for name in names("strategies"):
        with suppress(PluginError):  # it is named where it is chosen
            kind = strategy(name)
            able += [name] if trait in kind.options or getattr(kind, trait, False) else []
    return tuple(able)
