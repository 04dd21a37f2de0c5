"""The plugins, and what each of them brings.

The core imports no plugin, but for the public names in ``toolkit/__init__.py``, on first use. It asks here for a
command, a backend or a hook by its name, and what stands behind the name is imported then. So a plugin may be absent:
what it brings is missing, and the rest works. The same holds of one that is at fault. What only looks, advises or
measures is asked by :func:`call`, :func:`ask` or :class:`Guarded`, which cost one line in a log where it fails. What
carries out a key is asked by :func:`needed`, whose error names the key.

A plugin is a module with a value ``PLUGIN``. It imports no torch, since any command may read it. The plugins that come
with the toolkit are listed here, so that no start searches for them. Those of others are found by the entry-point group
``toolkit.plugins``, whose values name the modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from toolkit.base import logs
from toolkit.base.errors import ConfigError, JobFailedError, PluginError, RequestError, SlurmError

#: The version of this interface. A plugin that was written for another one is left out.
INTERFACE = 1
#: The entry-point group of other people's plugins.
GROUP = "toolkit.plugins"
#: The plugins that come with the toolkit, each a package below ``toolkit.plugins``.
BUILT_IN = (
    "after",
    "auto",
    "bad_samples",
    "balance",
    "checkpoints",
    "completion",
    "compression",
    "counted_steps",
    "curves",
    "disk",
    "hangs",
    "images",
    "inference",
    "init_from",
    "integrations",
    "live",
    "local_sgd",
    "logs",
    "memory",
    "monitor",
    "mpi",
    "muon",
    "new",
    "notify",
    "parameter_server",
    "pipeline",
    "profile",
    "pruning",
    "report",
    "second_place",
    "shell",
    "site",
    "spares",
    "srun",
    "staging",
    "sweep",
    "tensor",
    "testing",
    "tokens",
    "topology",
    "trackers",
    "watch",
    "why",
)

#: Those of them that bring sections of a config. The others need not be imported where a config is read.
WITH_SECTIONS = ("local_sgd", "parameter_server", "pipeline")

log = logs.get(__name__)

#: What a plugin may bring, see :class:`Plugin`.
Kind: TypeAlias = Literal[
    "commands", "strategies", "sections", "checks", "backends", "devices", "trackers", "hooks", "adapters", "datasets"
]


class StrategyTraits(NamedTuple):
    """What holds of a strategy, for the checks of a config. The defaults are those of the job's own step (custom)."""

    same_state: bool = False
    """Its state has the same names and values as that of the others with this trait (local_sgd: at the end of a round,
    with the mean). Another of them may continue a run, to rounding."""
    whole_update: bool = False
    """It does everything that ``train:`` asks for between gradients and weights."""
    sync_batch_norm: bool = False
    """BatchNorm may use all ranks' samples."""
    sharded: bool = False
    """A rank holds a part of each weight, or of many."""
    own_time: bool = False
    """Its ranks compute a step up to its backward pass before they wait for each other."""
    mesh: tuple[str, ...] = ("replicas",)
    """The dimensions that its mesh may have; the first one that is null takes the ranks that are left."""


@dataclass(frozen=True)
class Plugin:
    """What a plugin brings, by name. The values are modules, or ``module:attribute`` of one.

    * ``commands``: a module with a docstring for the help, ``EXAMPLES``, ``add_arguments(parser)`` and ``run(args)``.
    * ``strategies``: for a value of ``strategy.name``, a function that is called as ``build(config, session, train)``
      and returns a :class:`toolkit.strategies.protocol.Strategy`.
    * ``sections``: of a config, by their dotted keys: dataclasses as in `toolkit.config.schema`. Only plugins that come
      with the toolkit may bring some, for no other one is searched for when a config is read.
    * ``traits``: what holds of these strategies, as values. One without traits counts as ``custom`` where a config is
      checked.
    * ``checks``: a subclass of `toolkit.config.validation.StrategyChecks`: what else a strategy refuses in a config.
    * ``backends``: a value of ``dist.backend``, see :class:`toolkit.ranks.device.Backend`.
    * ``devices``: for torch's name of a type of device, a :class:`toolkit.devices.kinds.DeviceKind`.
    * ``trackers``: a class, see `toolkit.plugins.trackers.protocol`.
    * ``hooks``: functions and classes that the core asks for by name where it needs them. docs/plugins.md lists them.
    * ``adapters``: a call of the module makes a script one that has the toolkit in its loop, as ``toolkit.start()``.
    * ``datasets``: for a value of ``data.name``, a :class:`toolkit.config.catalog.Entry`.
    * ``waits``: for a function in which ranks wait for others, ``module:name``, what they do there, for users to read.
    """

    name: str
    commands: Mapping[str, str] = field(default_factory=dict)
    strategies: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, str] = field(default_factory=dict)
    traits: Mapping[str, StrategyTraits] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)
    backends: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    trackers: Mapping[str, str] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    interface: int = INTERFACE


#: What the core has itself is in the same table, so that no plugin can take its place.
_CORE_COMMANDS = ("submit", "supervise", "run", "exec", "status", "stop", "cancel", "resume")
# fmt: off
_CORE_TRAITS = {
    # same_state, whole_update, sync_batch_norm, sharded, own_time, mesh
    "ddp":    StrategyTraits(True, True, True,  False, True,  ("replicas",)),
    "fsdp":   StrategyTraits(True, True, True,  True,  False, ("shards", "replicas")),
    "zero":   StrategyTraits(True, True, True,  True,  False, ("shards", "replicas")),
    "dp":     StrategyTraits(True, True, False, False, False),
    "custom": StrategyTraits(),
}
# fmt: on
CORE = Plugin(
    "toolkit",
    commands={name: f"toolkit.cli.commands.{name}" for name in _CORE_COMMANDS},
    strategies=dict.fromkeys(_CORE_TRAITS, "toolkit.strategies"),
    traits=_CORE_TRAITS,
    checks=dict.fromkeys(_CORE_TRAITS, "toolkit.config.validation:StrategyChecks")
    | {"custom": "toolkit.config.validation:CustomChecks"},
    backends=dict.fromkeys(("auto", "nccl", "xccl", "gloo"), "torch.distributed"),
    datasets={name: f"toolkit.config.catalog:{name.upper()}" for name in ("digits", "synthetic")},
)


def names(kind: Kind) -> dict[str, str]:
    """Return all that there is of this kind: by name, where it is. The core's comes first, that of others last."""
    return {name: where for plugin in plugins() for name, where in _brought(plugin, kind).items()}


def where(kind: Kind, name: str) -> str | None:
    """Return where this is; None if no plugin brings it."""
    return next((brought[name] for plugin in _in_order() if name in (brought := _brought(plugin, kind))), None)


def traits(strategy: str) -> StrategyTraits:
    """Return what holds of a strategy."""
    brought = (plugin.traits.get(strategy) for plugin in _in_order() if strategy in plugin.strategies)
    return next(brought, None) or StrategyTraits()


def with_trait(trait: str) -> tuple[str, ...]:
    """Return the strategies that have this trait, those of other people's plugins last."""
    return tuple(name for name in names("strategies") if getattr(traits(name), trait))


def waits() -> dict[str, str]:
    """Return where ranks of plugins wait for others, and what they do there."""
    return {place: what for plugin in plugins() for place, what in plugin.waits.items()}


def sections(above: str) -> Iterator[tuple[str, Any]]:
    """Yield name and dataclass of the plugins' sections that belong below the section ``above``."""
    for plugin in _load_built_in(WITH_SECTIONS):
        for key, place in plugin.sections.items():
            prefix, _, name = key.rpartition(".")
            if prefix == above:
                try:
                    section = load(place)
                except (Exception, SystemExit) as error:  # every command reads these
                    log.warning("the section %s is left out: %s: %s: %s", key, place, type(error).__name__, error)
                else:
                    yield name, section


def is_missing(name: str) -> bool:
    """True for a plugin that comes with the toolkit and is not installed."""
    return name in BUILT_IN and all(plugin.name != name for plugin in built_in())


def find(kind: Kind, name: str) -> Any:
    """Return the module or the attribute; None if no plugin brings it.

    Raises PluginError if it cannot be imported, and OSError where a disk is away.
    """
    path = where(kind, name)
    try:
        return None if path is None else load(path)
    except (OSError, ConfigError):  # a refusal says what to do
        raise
    except (Exception, SystemExit) as error:  # it may be other people's code
        why = f"{type(error).__name__}: {error}"
        raise PluginError(f"{name} of {kind} needs {path}, which cannot be loaded: {why}") from error


def ask(hook: str, *arguments: Any) -> Any:
    """Return what the hook returns; None without one. What it says to the user passes, as a refusal.

    Any other exception of it is logged in one line, and counts as None. ``hook.name`` is an attribute of the hook.
    """
    name, _, attribute = hook.partition(".")
    try:
        found = find("hooks", name)
        if found is None:
            return None
        return (getattr(found, attribute) if attribute else found)(*arguments)
    except (RequestError, SlurmError, JobFailedError, BrokenPipeError):
        raise
    except Exception as error:  # it may be other people's code
        log.error("the hook %s has failed: %r", hook, error)
        return None


def call(hook: str, *arguments: Any) -> Any:
    """Return as :func:`ask` does. Each exception is logged in one line, and counts as None."""
    try:
        return ask(hook, *arguments)
    except Exception as error:
        log.error("the hook %s has failed: %r", hook, error)
        return None


class Guarded:
    """What a hook makes, and without which a run goes on. False without the hook, and once it has failed."""

    def __init__(self, hook: str, *arguments: Any) -> None:
        self._hook, self._made = hook, call(hook, *arguments)

    def __bool__(self) -> bool:
        return self._made is not None

    def ask(self, name: str, *arguments: Any, **more: Any) -> Any:
        """Return what its method returns, or its attribute; None if this is False.

        An exception is logged in one line, and the hook is not asked any more.
        """
        try:
            found = getattr(self._made, name) if self else None
            return found(*arguments, **more) if callable(found) else found
        except Exception as error:  # it may be other people's code
            log.error("the hook %s has failed, and is not asked any more: %r", self._hook, error)
            self._made = None
            return None


def require(hook: str, what: str) -> None:
    """Refuse ``what``, such as a key of the config, where no plugin has the hook. Raises ConfigError.

    The hook is not imported: on a login node there may be no torch.
    """
    if where("hooks", hook) is None:
        raise ConfigError(f"{what} needs a plugin that is not installed: the one with the hook {hook!r}")


def needed(hook: str, what: str) -> Any:
    """Return the hook that ``what`` needs. Raises ConfigError without it, PluginError if it cannot be loaded."""
    try:
        found = find("hooks", hook)
    except PluginError as error:
        raise PluginError(f"{what}: {error}") from error
    if found is None:
        require(hook, what)
    return found


def load(path: str) -> Any:
    """Return the module, or of ``module:attribute`` the attribute. Raises what the import raises."""
    module, _, attribute = path.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def _in_order() -> Iterator[Plugin]:
    """Yield the core, the plugins that come with it, then other people's. What is not asked for is not imported."""
    yield CORE
    yield from built_in()[1:]
    yield from plugins()[len(built_in()) :]


@cache
def built_in() -> tuple[Plugin, ...]:
    """Return the core and the plugins that come with it, as far as they are installed."""
    return (CORE, *_load_built_in(BUILT_IN))


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return all plugins. The search of the installed packages takes some hundredths of a second."""
    from importlib.metadata import entry_points

    found = [*built_in()]
    for plugin in _load((entry.name, entry.value) for entry in sorted(entry_points(group=GROUP))):
        if taken := next(_shared(plugin, found), None):
            log.warning("plugin %s is left out: %s", plugin.name, taken)
        else:
            found.append(plugin)
    return tuple(found)


def _load_built_in(names: Iterable[str]) -> Iterator[Plugin]:
    return _load((name, f"toolkit.plugins.{name}.plugin") for name in names)


def _load(modules: Iterable[tuple[str, str]]) -> Iterator[Plugin]:
    """Yield the plugins of these modules. One that is at fault is named in a line, and left out."""
    for name, path in modules:
        try:
            plugin = import_module(path).PLUGIN
        except (Exception, SystemExit) as error:  # it may be other people's code
            if isinstance(error, ModuleNotFoundError) and path.startswith(f"{error.name}"):
                continue  # a toolkit without this plugin
            log.warning("plugin %s is left out: %s: %s", name, type(error).__name__, error)
            continue
        if not isinstance(plugin, Plugin):
            log.warning("plugin %s is left out: PLUGIN of %s is no toolkit.registry.Plugin", name, path)
        elif plugin.interface != INTERFACE:
            version = "plugin %s is left out: it was written for version %s of toolkit.registry, and this is version %d"
            log.warning(version, name, plugin.interface, INTERFACE)
        elif wrong := _misdeclared(plugin):
            log.warning("plugin %s is left out: %s", name, wrong)
        else:
            yield plugin


def _misdeclared(plugin: Plugin) -> str:
    """Return what is no mapping by names; empty where all is as :class:`Plugin` says."""
    if not isinstance(plugin.name, str) or not plugin.name:
        return f"its name is {plugin.name!r}"
    for kind in (*get_args(Kind), "traits", "waits"):
        brought, values = getattr(plugin, kind), StrategyTraits if kind == "traits" else str
        if not isinstance(brought, Mapping):
            return f"its {kind} are {brought!r}, and no mapping"
        for item in brought.items():
            if not isinstance(item[0], str) or not isinstance(item[1], values):
                return f"of its {kind}, {item[0]!r}: {item[1]!r} is not a name and a {values.__name__}"
    return ""


def _shared(plugin: Plugin, others: Iterable[Plugin]) -> Iterator[str]:
    """Yield what ``plugin`` has in common with others, and what only they may bring."""
    if plugin.sections:
        yield "sections of a config come with the toolkit's own plugins only; a job has keys of its own in params"
    for other in others:
        if other.name == plugin.name:
            yield "there is one of this name"
        for kind in get_args(Kind):
            for name in _brought(plugin, kind).keys() & _brought(other, kind).keys():
                yield f"{name} of {kind} is there already, by {other.name}"


def _brought(plugin: Plugin, kind: Kind) -> Mapping[str, str]:
    brought: Mapping[str, str] = getattr(plugin, kind)
    return brought
