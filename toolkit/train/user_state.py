"""What a user's own loop saves: models, optimizers and anything with a state.

The names are the Trainer's (``model/<name>``, ``optim/<parameter>/<slot>``), so that all commands read the checkpoints
and any number of ranks continues from them. Nothing is pickled.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.swa_utils import AveragedModel

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing
from toolkit.checkpoint.exchange import ReplicaSums, refuse_differing
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.tensors import check_plain, to_bytes
from toolkit.data import randomness
from toolkit.data.randomness import is_generator
from toolkit.ranks.collectives import broadcast_tensors, gather_rows, sum_by_name
from toolkit.ranks.state import Entry, Json, PerRank, Replicated, entry, local
from toolkit.strategies.models import SUFFIX, ExtraState, refuse_copies
from toolkit.train import plain_state
from toolkit.train.handed_over import Accumulation, Frozen, Unsaved, bare, bare_optimizer, is_metric
from toolkit.train.loss_windows import gather_json
from toolkit.train.plain_state import OptimizerSlots

log = logs.get(__name__)

MODEL, AVERAGE, OTHERS, BUFFERS, GRADIENTS = "model", "ema", "state", "update/buffers", "gradients"
GENERATORS = "update/generators"
#: In :meth:`UserState.value_digests` a longer list or dictionary is one value, and a longer text a digest.
MOST_PARTS, MOST_LETTERS = 100, 40


@runtime_checkable
class HasStateDict(Protocol):
    """Objects with torch's two methods: schedulers, scalers, metrics, stateful loaders."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class UserState:
    """The objects that a loop hands over by name; see :class:`~toolkit.train.saver.Checkpointed`."""

    def __init__(self, objects: Mapping[str, Any], rank: int, world_size: int, device: torch.device) -> None:
        """Sort the objects by kind. Raises ConfigError, by name, for what cannot be saved."""
        self._rank, self._world_size, self._device = rank, world_size, device
        self._objects, self._is_loaded = list(objects.values()), False
        modules = {name: bare(value) for name, value in objects.items() if isinstance(value, nn.Module)}
        # A metric is a module, but its state is each rank's own: it is saved with the others below.
        modules = {name: value for name, value in modules.items() if not is_metric(value)}
        for name, module in modules.items():
            named = [*module.named_parameters(), *module.named_buffers()]
            if lazy := [key for key, value in named if is_lazy(value)]:
                raise ConfigError(
                    f"run.resumable: {name}: {listing(lazy, 3)} have no shape before the first batch: run one through "
                    "the model before run.resumable, and before the optimizer is made"
                )
        _refuse_average_of_another(modules)
        self._modules = _prefixed(modules)
        for name, module in modules.items():
            refuse_copies(f"run.resumable: {name}", module)
        self._shapes = self._shapes_now()
        #: By the names of :meth:`_named_buffers`.
        self._filled_buffers: dict[str, Tensor] = {}
        self._resized: dict[str, Tensor] = {}
        self._extra = {prefix: ExtraState(module, prefix) for prefix, module in self._modules.items()}
        optimizers = {name: bare_optimizer(o) for name, o in objects.items() if isinstance(o, Optimizer)}
        names = self._parameters()
        self._optimizers = {name: OptimizerSlots(name, each, names) for name, each in optimizers.items()}
        self.accumulation = Accumulation([slots.optimizer for slots in self._optimizers.values()])
        self._filled_gradients: dict[Tensor, Tensor] = {}  #: by parameter
        owners: dict[Tensor, str] = {}
        for name, slots in self._optimizers.items():
            for parameter in slots.parameters():
                if owners.setdefault(parameter, name) != name:
                    raise ConfigError(
                        f"run.resumable: {owners[parameter]} and {name} have a parameter of shape "
                        f"{tuple(parameter.shape)} in common: a checkpoint has one state for each"
                    )
        self._frozen = Frozen(names, [value for value in objects.values() if isinstance(value, nn.Module)])
        others = {name: value for name, value in objects.items() if name not in {*modules, *optimizers}}
        self._unsaved = Unsaved(self._modules if rank == 0 else {}, _leaves(others))
        #: What the script gave its generators. A filled one is at the epoch that was saved.
        self.origins = {each: randomness.origin_of(each) for each in others.values() if is_generator(each)}
        self._others = {name: _other(name, value) for name, value in others.items()}
        # Those that layers draw from in a pass. On another number of ranks they stay as the script makes them.
        drawing = {id(each): each for module in modules.values() for each in randomness.generators_of(module)}
        self._generators = {
            f"{GENERATORS}/rank{rank}/{number}": _other(GENERATORS, each)
            for number, each in enumerate(drawing.values())
            if not self.has(each)
        }
        self._filled_generators: list[str] = []
        # A moving average is saved as a module; its count of updates is not among the averaged weights.
        for name, module in modules.items():
            if isinstance(module, AveragedModel):
                count = module.n_averaged
                self._others[name] = PlainObject(name, partial(int, count), count.fill_)

    def has(self, thing: object) -> bool:
        """True if ``thing`` was handed over."""
        return any(thing is found for found in self._objects)

    def has_filled(self, thing: object) -> bool:
        """True if ``thing`` was handed over and filled from a checkpoint."""
        return self._is_loaded and self.has(thing)

    def _parameters(self) -> dict[Tensor, str]:
        """Return each parameter's name, without ``model/``."""
        names: dict[Tensor, str] = {}
        for prefix, module in self._modules.items():
            for name, parameter in module.named_parameters():
                names[parameter] = (prefix + name).removeprefix(f"{MODEL}/")
        return names

    @property
    def _own_place(self) -> str:
        return f"{BUFFERS}/rank{self._rank}/"

    def state(self) -> dict[str, Entry]:
        """Return everything as it is now, live; a collective."""
        self._refuse_another_model()
        entries = self._weights()
        entries |= self._buffers(entries.keys())
        entries |= self._frozen.entries()
        for slots in self._optimizers.values():
            entries |= slots.entries()
        entries |= self._gradients()
        # What is equal on all ranks is stored once, and fits any number of ranks; the rest is stored for each rank.
        parts = {name: other.take_apart() for name, other in self._others.items()}
        if parts:
            digests = [_digest(*part) for part in parts.values()]
            rows = gather_rows(torch.tensor(digests, dtype=torch.int64, device=self._device))
            are_equal: list[bool] = (rows == rows[0]).all(dim=0).tolist()
            for (name, (value, tensors)), is_equal in zip(parts.items(), are_equal, strict=True):
                at, kind = (_place(name), Replicated) if is_equal else (_place(name, self._rank), PerRank)
                entries |= plain_state.entries_of(at, kind, value, tensors)
        for at, generator in self._generators.items():
            entries |= plain_state.entries_of(at, PerRank, *generator.take_apart())
        return entries

    def _shapes_now(self) -> dict[str, object]:
        """Return all names of the modules' states; with parameters' shapes, since buffers may grow."""
        shapes: dict[str, object] = {}
        for prefix, module in self._modules.items():
            shapes |= {f"{prefix}{name}": None for name in module.state_dict()}
            shapes |= {f"{prefix}{name}": parameter.shape for name, parameter in module.named_parameters()}
        return shapes

    def _refuse_another_model(self) -> None:
        """Raise ConfigError where modules have changed: a start makes them as they were, and could not load this."""
        now = self._shapes_now()
        other = [name for name in {**self._shapes, **now} if self._shapes.get(name, self) != now.get(name, self)]
        if other:
            raise ConfigError(
                f"run.resumable: {listing(other, 4)} came, went or changed their shape after the call, so no start "
                "could load a checkpoint. Change the model before run.resumable: prune there with amount=0 and set the "
                "masks in the loop; add adapters and new heads there, and freeze them until they are used"
            )

    def check(self) -> None:
        """Raise now what the next save would: for a state of other types, and replicas that differ. A collective."""
        state = self.state()
        for name, each in state.items():
            if isinstance(each.value, Tensor):
                check_plain(name, each.value)
        sums = ReplicaSums(state)
        digests = gather_rows(torch.tensor([sums.digest()], dtype=torch.int64, device=self._device)).flatten().tolist()
        if len(set(digests)) > 1:
            for name, slots in self._optimizers.items():
                if isinstance(slots.optimizer, LBFGS):
                    raise ConfigError(
                        f"run.resumable: the ranks have drifted apart, and {name} is LBFGS, which decides by the loss "
                        "that its closure returns: return the mean of all ranks, sum(run.gather(loss)) / "
                        "run.world_size"
                    )
            by_rank = gather_json(dict(sums.sums()), self._device)
            for rank, theirs in enumerate(by_rank):
                refuse_differing(by_rank[0], theirs, rank)

        if changed := self._unsaved.changed():
            log.warning(
                "%s changed in the first step, and no state_dict() has it: after a resume it starts over. If later "
                "steps depend on it, make it a persistent buffer (register_buffer), or hand it over to run.resumable",
                listing(changed, 5),
            )

    def _gradients(self) -> dict[str, Entry]:
        """Return the gradients of optimizers that made no step in the loop's last one while another did.

        Replicas may have added up other batches than their peers; of these the mean counts.
        """
        entries: dict[str, Entry] = {}
        names = self._parameters()
        for slots in self._optimizers.values():
            if self.accumulation.may_hold_gradients(slots.optimizer):
                for parameter in slots.parameters():
                    if parameter.grad is not None:
                        entries |= self._gradient(names[parameter], parameter.grad)
        return entries

    def _gradient(self, name: str, gradient: Tensor) -> dict[str, Entry]:
        at = _gradient_of(name, gradient, self._rank)
        return {at: entry(gradient) if isinstance(gradient, DTensor) else PerRank(gradient, averages=True)}

    def _places_of_gradients(self, manifest: Manifest) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        self._filled_gradients = {}
        rank = self._rank if manifest.world_size == self._world_size else 0  # on other ranks, the mean of all
        for parameter, name in self._parameters().items():
            record = manifest.tensors.get(_gradient_of(name, parameter, rank))
            if record is not None:
                gradient = torch.zeros_like(parameter, dtype=getattr(torch, record.dtype), requires_grad=False)
                self._filled_gradients[parameter] = gradient
                entries |= self._gradient(name, gradient)
        return entries

    def _buffers(self, saved: Collection[str]) -> dict[str, Entry]:
        """Return rank 0's buffers under their names, those of ``saved``, and this rank's where they are others.

        BatchNorm's statistics are an example. The live ones do not change.
        """
        named = {name: buffer for name, buffer in self._named_buffers().items() if name in saved}
        # NCCL sends nothing from host memory, where an average may be kept.
        first = {name: buffer.to(self._device, copy=self._rank > 0) for name, buffer in named.items()}
        broadcast_tensors(first.values(), source=0)
        entries: dict[str, Entry] = {}
        for name, buffer in named.items() if self._rank else ():
            given = first[name].to(buffer.device)
            if not torch.equal(buffer, given):
                entries |= {name: Replicated(given), f"{self._own_place}{name}": PerRank(buffer)}
        return entries

    def _named_buffers(self) -> dict[str, Tensor]:
        return {
            f"{prefix}{name}": buffer
            for prefix, module in self._modules.items()
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if not isinstance(buffer, DTensor)
        }

    def places(self, manifest: Manifest) -> dict[str, Entry]:
        """Return what is to be filled from a checkpoint. Weights are filled in place, the rest as new tensors."""
        entries = self._weights(exchange=False)
        entries |= self._frozen.entries()
        self._resized, self._filled_buffers = {}, {}
        for name, buffer in self._named_buffers().items():
            # Some modules size their buffers as they run, such as observers of a quantization, and as they load them.
            record = manifest.tensors.get(name)
            if name in entries and record is not None and record.shape != buffer.shape:
                self._resized[name] = buffer.new_zeros(record.shape)
                entries[name] = Replicated(self._resized[name])
            # On another number of ranks all have rank 0's buffers.
            record = manifest.tensors.get(f"{self._own_place}{name}")
            if record is not None and manifest.world_size == self._world_size:
                self._filled_buffers[name] = buffer.new_zeros(record.shape)
        entries |= {f"{self._own_place}{name}": PerRank(buffer) for name, buffer in self._filled_buffers.items()}
        for slots in self._optimizers.values():
            entries |= slots.places(manifest)
        entries |= self._places_of_gradients(manifest)
        for name, other in self._others.items():
            # The save decided whether the object is stored once or for each rank.
            own = _place(name, self._rank)
            at, kind = (own, PerRank) if own in manifest.values else (_place(name), Replicated)
            other.filled = plain_state.places_of(at, manifest)
            entries |= plain_state.entries_of(at, kind, None, other.filled)
        is_same_size = manifest.world_size == self._world_size
        self._filled_generators = [at for at in self._generators if is_same_size and at in manifest.values]
        for at in self._filled_generators:
            self._generators[at].filled = plain_state.places_of(at, manifest)
            entries |= plain_state.entries_of(at, PerRank, None, self._generators[at].filled)
        return entries

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Put the state back, once the places are filled. ``values`` are the entries that are no tensors."""
        for prefix, module in self._modules.items() if self._resized else ():
            of_this = {name.removeprefix(prefix): b for name, b in self._resized.items() if name.startswith(prefix)}
            try:
                module.load_state_dict({**module.state_dict(), **of_this})
            except RuntimeError as error:
                raise ConfigError(f"run.resumable: the checkpoint is another model's: {error}") from None
        buffers = self._named_buffers()
        for name, filled in self._filled_buffers.items():
            buffers[name].copy_(filled)
        self._frozen.on_loaded(values)
        for extra in self._extra.values():
            extra.on_loaded(values)
        for name, slots in self._optimizers.items():
            slots.on_loaded(values)
            if slots.overruled and self._rank == 0:
                log.warning(
                    "%s: the script now gives it %s, and the checkpoint's values count; to change them, set them after "
                    "run.resumable",
                    name,
                    listing(slots.overruled, 4),
                )
        for parameter, gradient in self._filled_gradients.items():
            parameter.grad = gradient
        for name, other in self._others.items():
            own = _place(name, self._rank)
            other.put_together(values[own] if own in values else values[_place(name)])
        for at in self._filled_generators:
            self._generators[at].put_together(values[at])
        self._is_loaded = True

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        return sum_by_name(values, self._device)

    def live_state(self) -> dict[str, Tensor]:
        # A frozen one may be infinite by design, as a mask of attention.
        named = self._parameters().items()
        live = {f"{'weights' if each.requires_grad else 'frozen'}/{name}": local(each) for each, name in named}
        for prefix, module in self._modules.items():
            where = prefix.removeprefix(f"{MODEL}/")
            live |= {f"buffers/{where}{name}": local(buffer) for name, buffer in module.named_buffers()}
        for slots in self._optimizers.values():
            live |= slots.live_state()
        return live

    def value_digests(self) -> dict[str, str]:
        """Return the values in each other object, by their places: ``lr_scheduler.last_epoch``. Long ones are digests.

        Loaders are left out: their batches tell where they are.
        """
        others = {**self._others, **{f"generator {n}": each for n, each in enumerate(self._generators.values())}}
        return dict(chain.from_iterable(each.parts(name) for name, each in others.items() if not each.is_loader))

    def rate(self) -> float:
        """Return the learning rate of the first optimizer, 0 without one."""
        return next((float(slots.optimizer.param_groups[0]["lr"]) for slots in self._optimizers.values()), 0.0)

    def _weights(self, *, exchange: bool = True) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for prefix, module in self._modules.items():
            named = module.state_dict().items()
            entries |= {f"{prefix}{name}": entry(value) for name, value in named if not name.endswith(SUFFIX)}
            entries |= self._extra[prefix].entries() if exchange else self._extra[prefix].places()
        return entries


class PlainObject:
    """Any object whose state is a tree of plain values and tensors."""

    def __init__(
        self, name: str, get: Callable[[], Any], put: Callable[[Any], object], *, is_loader: bool = False
    ) -> None:
        self._name, self._get, self._put = name, get, put
        self.is_loader = is_loader
        self.filled: list[Tensor] = []  #: the places of its tensors

    def take_apart(self) -> tuple[Json, list[Tensor]]:
        tensors: list[Tensor] = []
        return plain_state.encode(self._get(), self._name, tensors), tensors

    def parts(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the place and the text of each value, places beginning with ``name``."""
        self.take_apart()  # refuses containers in themselves
        return _parts(self._get(), name)

    def put_together(self, value: Json) -> None:
        self._put(plain_state.decode(value, self.filled))


def _prefixed(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules by the prefix of their names in a checkpoint.

    ``model``, or a single module under any name, is the model. Other modules next to ``model`` keep their name. Several
    without one called ``model`` are the parts of one model, as in a job with a ``train_step``. A moving average
    (``AveragedModel``) gives its averaged weights.
    """
    by_prefix: dict[str, nn.Module] = {}
    plain = [name for name, module in modules.items() if not isinstance(module, AveragedModel)]
    for name, module in modules.items():
        if isinstance(module, AveragedModel):
            by_prefix[f"{name}/"] = bare(module.module)  # with the names of the model that it averages
        elif name == MODEL or len(plain) == 1:
            by_prefix[f"{MODEL}/"] = module
        else:
            by_prefix[f"{name}/" if MODEL in plain else f"{MODEL}/{name}."] = module
    return by_prefix


def _leaves(value: Any) -> Iterator[object]:
    """Yield what is in dictionaries and lists."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    else:
        yield value


def _refuse_average_of_another(modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError if ``ema`` averages another network than ``model``. It begins as a copy of that."""
    if not {MODEL, AVERAGE} <= modules.keys():
        return
    average = modules[AVERAGE]
    inner = bare(average.module) if isinstance(average, AveragedModel) else average

    def is_copied(module: nn.Module) -> bool:
        ones, others = ({name: local(p) for name, p in each.named_parameters()} for each in (module, inner))
        return ones.keys() == others.keys() and all(torch.equal(p, others[name].to(p)) for name, p in ones.items())

    copied = [name for name, each in modules.items() if each is not average and is_copied(each)]
    if copied and MODEL not in copied:
        raise ConfigError(
            f"run.resumable: ema is an average of {copied[0]}, and `toolkit checkpoint export` gives ema as the "
            f"average of model; hand it over under another name: run.resumable(ema_{copied[0]}=...)"
        )


def _place(name: str, rank: int | None = None) -> str:
    return f"{OTHERS}/{name}" if rank is None else f"{OTHERS}/{name}/rank{rank}"


def _gradient_of(name: str, tensor: Tensor, rank: int) -> str:
    """Return a gradient's name in a checkpoint; ``tensor`` is the gradient or its parameter."""
    return f"{GRADIENTS}/{name}" if isinstance(tensor, DTensor) else f"{GRADIENTS}/rank{rank}/{name}"


def _digest(value: Json, tensors: list[Tensor]) -> int:
    return zlib.crc32(b"".join([repr(value).encode(), *(to_bytes("state", tensor) for tensor in tensors)]))


def _parts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each value in a state; ``#`` and a digest for a long one."""
    named: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        named = ((f"{where}.{key}", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, deque)):
        named = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    if named and 0 < len(value) <= MOST_PARTS:
        for place, item in named:
            yield from _parts(item, place)
        return
    text = ""
    if value is None or isinstance(value, (int, float, str, np.generic)):
        text = repr(value)
    elif type(value) is Tensor and value.numel() == 1:
        text = f"tensor({value.item()!r})"
    if not text or len(text) > MOST_LETTERS:
        tensors: list[Tensor] = []
        text = f"#{_digest(plain_state.encode(value, where, tensors), tensors):08x}"
    yield where, text


def _refill(live: Any, saved: Any) -> None:
    live.clear()
    if isinstance(live, dict):
        live.update(saved)
    else:
        live.extend(saved)


def _metric(name: str, metric: nn.Module) -> PlainObject:
    """Return the metric with its number of updates. That weighs a mean over them, and is not in the state dict."""
    metric.persistent(True)  # type: ignore[operator]  # nn.Module's attributes may be tensors
    parts: dict[str, Any] = {path: m for path, m in metric.named_modules() if hasattr(m, "_update_count")}

    def get() -> dict[str, Any]:
        return {"state": metric.state_dict(), "updates": {path: part._update_count for path, part in parts.items()}}

    def put(saved: dict[str, Any]) -> None:
        metric.load_state_dict(saved["state"])
        for path, part in parts.items():
            part._update_count = saved["updates"][path]
            part.to(part.device)  # load_state_dict kept the tensors where they were: in host memory

    return PlainObject(name, get, put)


def _other(name: str, value: Any) -> PlainObject:
    """Return how to read the state of ``value`` and put it back. Raises ConfigError where that cannot be done."""
    if is_metric(value):
        return _metric(name, value)
    if isinstance(value, HasStateDict):
        return PlainObject(name, value.state_dict, value.load_state_dict, is_loader=isinstance(value, Iterable))
    if is_generator(value):
        return PlainObject(name, partial(randomness.state_of, value), partial(randomness.set_state, value))
    if isinstance(value, Tensor):
        return PlainObject(name, lambda: value, lambda saved: value.detach().copy_(saved))
    if isinstance(value, dict):
        return PlainObject(name, lambda: dict(value), partial(_refill, value))
    if isinstance(value, list | deque):
        return PlainObject(name, lambda: list(value), partial(_refill, value))
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        raise ConfigError(
            f"run.resumable: {name} is {value!r}, which cannot be filled in place; put it into a dictionary: "
            f'run.resumable(progress={{"{name}": {value!r}}})'
        )
    raise ConfigError(
        f"run.resumable: {name} is of type {type(value).__qualname__}, which has no state_dict() and "
        "load_state_dict(); give it both, or hand over what of it changes in a dictionary: all its attributes are "
        f"run.resumable({name}=vars(...))"
    )
