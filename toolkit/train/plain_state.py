"""State of any object as JSON and tensors: what ``state_dict()`` returns, stored without pickle.

:func:`encode` turns nested builtin containers, numbers, texts, bytes, tensors and numpy arrays into JSON and a list of
the tensors. :func:`decode` gives back equal values of the same types. A type that JSON does not have is a mapping with
one key that begins with ``$``. Anything else is an error that names its place, such as ``scheduler.lr_lambdas[0]``.

An optimizer's state is kept by parameter names (``optim/<parameter>/<slot>``).
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from toolkit.base.errors import ConfigError, listing
from toolkit.checkpoint.manifest import Manifest, TensorRecord
from toolkit.checkpoint.tensors import other_than_plain
from toolkit.devices import accelerator
from toolkit.ranks.state import Entry, Json, PerRank, Replicated, entry, local


def encode(value: Any, where: str, tensors: list[Tensor], above: tuple[int, ...] = ()) -> Json:
    """Return ``value`` as JSON, and append its live tensors to ``tensors``.

    Raises ConfigError for what cannot be stored, with its place, which begins with ``where``. ``above`` are the
    containers that it is in.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    # By exact type: numpy's float64 is a float as well, and belongs to the arrays below.
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if consists_of_tensors(value):
        return {"$subclass": _encode_subclass(value, where, tensors)}
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if id(value) in above:
        raise ConfigError(
            f"run.resumable: {where} is one of the containers that it is in, and no checkpoint holds that"
        )
    above = (*above, id(value))
    # Lists, and mappings with plain keys, are JSON already; other containers get a key with ``$``.
    if type(value) is list:
        return [encode(item, f"{where}[{index}]", tensors, above) for index, item in enumerate(value)]
    if type(value) is dict and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}", tensors, above) for key, item in value.items()}
    for word, kind, take_apart, _ in _KINDS:
        if type(value) is kind:
            items = enumerate(take_apart(value))
            return {word: [encode(item, f"{where}[{index}]", tensors, above) for index, item in items]}
    raise ConfigError(
        f"run.resumable: {where} is of type {type(value).__qualname__}, which a checkpoint cannot hold: it unpickles "
        "nothing. Give its object a state_dict() of numbers, texts, lists, dictionaries and tensors"
    )


def decode(value: Json, tensors: list[Tensor]) -> Any:
    """Return what :func:`encode` was given; the tensors in it are those of ``tensors``."""
    if isinstance(value, Mapping):
        ((word, inner),) = value.items() if len(value) == 1 else (("", None),)
        if word in _DECODERS:
            return _DECODERS[word](inner, tensors)
        return {key: decode(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [decode(item, tensors) for item in value]
    return value


def _encode_tensor(value: Tensor | np.ndarray | np.generic, where: str, tensors: list[Tensor]) -> Json:
    if isinstance(value, DTensor):
        raise ConfigError(f"run.resumable: {where} is a DTensor; only a module's and an optimizer's can be resharded")
    word = "$tensor"
    if not isinstance(value, Tensor):
        word = "$array" if isinstance(value, np.ndarray) else "$scalar"
        try:
            value = torch.from_numpy(np.array(value))  # a copy in C order
        except (TypeError, ValueError):  # ValueError: of another byte order
            raise ConfigError(
                f"run.resumable: {where} is an array of {value.dtype}, which torch does not have; hand over one of "
                "numbers, in this machine's byte order: value.astype(value.dtype.newbyteorder('='))"
            ) from None
    elif value.device.type != "cpu":
        word = "$device"
    if what := other_than_plain(value):
        raise ConfigError(
            f"run.resumable: {where} is {what}, which a checkpoint cannot hold; hand over a dense tensor, "
            "such as .to_dense(), .dequantize() or .as_subclass(torch.Tensor) gives"
        )
    tensors.append(value)
    return {word: len(tensors) - 1}


def consists_of_tensors(value: Any) -> bool:
    """True for a tensor subclass that holds several plain tensors, such as torchao's states of 8 bits."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor)


def _encode_subclass(value: Any, where: str, tensors: list[Tensor]) -> Json:
    # torch's protocol for such classes: https://docs.pytorch.org/docs/stable/notes/extending.html
    names, context = value.__tensor_flatten__()
    return {
        "class": [type(value).__module__, type(value).__qualname__],
        "context": encode(context, f"{where}.context", tensors),
        "parts": {name: encode(getattr(value, name), f"{where}.{name}", tensors) for name in names},
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }


def _decode_subclass(saved: Any, tensors: list[Tensor]) -> Tensor:
    module, name = saved["class"]
    kind: Any = getattr(sys.modules.get(module), name, None)  # a checkpoint has nothing imported
    if not (isinstance(kind, type) and issubclass(kind, Tensor)):
        raise ConfigError(
            f"run.resumable: the checkpoint holds a tensor of {module}.{name}, which is not imported here"
        )
    parts, context = (decode(saved[key], tensors) for key in ("parts", "context"))
    put_together: Callable[..., Tensor] = kind.__tensor_unflatten__  # type: ignore[attr-defined]
    return put_together(parts, context, torch.Size(saved["shape"]), tuple(saved["stride"]))


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [list(pair) for pair in value.items()]


_in_order = partial(sorted, key=repr)
#: Key, type, how to take it apart into items that are encoded, and how to put it together.
_KINDS: tuple[tuple[str, type, Callable[[Any], Any], Callable[[list[Any]], Any]], ...] = (
    ("$tuple", tuple, list, tuple),
    ("$bytearray", bytearray, lambda value: [bytes(value)], lambda items: bytearray(items[0])),
    ("$size", torch.Size, list, torch.Size),
    ("$dict", dict, _pairs, dict),
    ("$ordered", OrderedDict, _pairs, OrderedDict),
    ("$counter", Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    ("$set", set, _in_order, set),
    ("$frozenset", frozenset, _in_order, frozenset),
    ("$deque", deque, lambda value: [value.maxlen, *value], lambda items: deque(items[1:], items[0])),
)


def _joined(put_together: Callable[[list[Any]], Any]) -> Callable[[Any, list[Tensor]], Any]:
    return lambda inner, tensors: put_together([decode(item, tensors) for item in inner])


_DECODERS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "$float": lambda inner, tensors: float(inner),
    "$bytes": lambda inner, tensors: base64.b64decode(inner),
    "$dtype": lambda inner, tensors: getattr(torch, inner),
    "$tensor": lambda inner, tensors: tensors[inner],
    # On the rank's GPU, where it was saved from; on the CPU where there is none.
    "$device": lambda inner, tensors: tensors[inner].to(accelerator.kind().type),
    "$subclass": _decode_subclass,
    "$array": lambda inner, tensors: tensors[inner].numpy(),
    "$scalar": lambda inner, tensors: tensors[inner].numpy()[()],
    **{word: _joined(put_together) for word, _, _, put_together in _KINDS},
}


def entries_of(at: str, kind: type[Replicated | PerRank], value: Json, tensors: Iterable[Tensor]) -> dict[str, Entry]:
    """Return the entries of one object: its value, and its tensors by number."""
    entries: dict[str, Entry] = {at: kind(value)}
    for index, tensor in enumerate(tensors):
        entries[f"{at}/{index}"] = kind(tensor)
    return entries


def places_of(at: str, manifest: Manifest) -> list[Tensor]:
    """Return new tensors like those that a checkpoint has of one object."""
    count = len([key for key in manifest.tensors if key.startswith(f"{at}/")])
    records = [manifest.tensors[f"{at}/{index}"] for index in range(count)]
    return [torch.zeros(record.shape, dtype=getattr(torch, record.dtype)) for record in records]


OPTIMIZER, GROUPS = "optim", "groups"


class OptimizerSlots:
    """An optimizer's state under parameter names, and the settings of its groups, which schedulers change."""

    def __init__(self, name: str, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        self._name, self._at, self.optimizer, self._names = name, f"{GROUPS}/{name}", optimizer, names
        self._filled: dict[str, list[Tensor]] = {}  #: by slot or settings, the places of tensors in them
        self._handed_over = self._names_by_group()
        #: The numbers among the settings of each group, as the script has given them.
        self._given = [
            {key: value for key, value in group.items() if isinstance(value, (int, float))}
            for group in optimizer.param_groups
        ]
        self.overruled: list[str] = []  #: what the script has changed since the save, and the checkpoint has put back

    def _names_by_group(self) -> list[list[str]]:
        """Return the names of each group's parameters. Raises ConfigError for those of other models."""
        unknown = [parameter for parameter in self.parameters() if parameter not in self._names]
        if unknown:
            shapes = listing([str(tuple(parameter.shape)) for parameter in unknown], 3)
            raise ConfigError(
                f"run.resumable: {self._name} has {len(unknown)} parameters of no model that was handed over (of shape "
                f"{shapes}): hand over their module as well (a single tensor: in an nn.ParameterList), and make the "
                "optimizer after DDP, fully_shard and .to()"
            )
        return [[self._names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def entries(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for name, value in self._slots():
            key, tensors = f"{OPTIMIZER}/{name}", list[Tensor]()
            if _is_entry(value):
                entries[key] = entry(value)
            else:  # a number, a list of tensors as LBFGS keeps it, or several in one as torchao does
                entries |= entries_of(key, Replicated, encode(value, key, tensors), tensors)
        names = self._names_by_group()
        if names[: len(self._handed_over)] != self._handed_over:
            raise ConfigError(
                f"run.resumable: {self._name} has other parameters in its groups than when it was handed over, and no "
                "resume could load that; leave these groups as they are, and add others by add_param_group()"
            )
        groups: list[Json] = []
        tensors = []
        for index, group in enumerate(self.optimizer.param_groups):
            plain = {key: value for key, value in group.items() if key != "params"}
            settings = encode(plain, f"{self._name}.param_groups[{index}]", tensors)
            given = self._given[index] if index < len(self._given) else {}
            groups.append(
                {"parameters": len(names[index]), "names": names[index], "settings": settings, "given": given}
            )
        record: Json = {"class": type(self.optimizer).__name__, "groups": groups}
        return entries | entries_of(self._at, Replicated, record, tensors)

    def places(self, manifest: Manifest) -> dict[str, Entry]:
        # There may be the places, and the added groups, of a checkpoint that turned out to be damaged.
        self.optimizer.state.clear()
        self._add_groups(manifest)
        self._filled = {self._at: places_of(self._at, manifest)}
        entries = entries_of(self._at, Replicated, None, self._filled[self._at])
        for parameter, slot, key, settings in self._stored([*manifest.tensors, *manifest.values]):
            if record := manifest.tensors.get(key):
                value = self.optimizer.state[parameter][slot] = _place_of(parameter, slot, record, settings)
                entries[key] = entry(value)
            else:
                self._filled[key] = places_of(key, manifest)
                entries |= entries_of(key, Replicated, None, self._filled[key])
        return entries

    def _add_groups(self, manifest: Manifest) -> None:
        """Add the groups that the script had added until the save. It does not pass that line again."""
        del self.optimizer.param_groups[len(self._handed_over) :]
        saved = manifest.values.get(self._at)
        parameters = {name: parameter for parameter, name in self._names.items()}
        for group in saved.value["groups"][len(self._handed_over) :] if saved is not None else ():
            missing = [name for name in group["names"] if name not in parameters]
            if missing:
                raise ConfigError(
                    f"run.resumable: a group that was added to {self._name} has parameters of no model that was handed "
                    f"over: {listing(missing, 3)}"
                )
            self.optimizer.add_param_group({"params": [parameters[name] for name in group["names"]]})

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Put the values and settings back. Raises ConfigError where the checkpoint is another optimizer's."""
        for parameter, slot, key, _ in self._stored(values):
            self.optimizer.state[parameter][slot] = decode(values[key], self._filled[key])
        # Settings belong to groups by their order, so the class and the groups' sizes must match.
        saved: Any = values[self._at]
        saved_sizes = [group["parameters"] for group in saved["groups"]]
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        kind = type(self.optimizer).__name__
        if (saved["class"], saved_sizes) != (kind, sizes):
            raise ConfigError(
                f"run.resumable: the checkpoint holds the state of {saved['class']} with groups of {saved_sizes} "
                f"parameters, and here is {kind} with {sizes}"
            )
        for group, saved_group in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            for key, value in decode(saved_group["settings"], self._filled[self._at]).items():
                if isinstance(group.get(key), Tensor):  # a learning rate of a captured graph, read in place
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value
        for given, saved_group in zip(self._given, saved["groups"], strict=False):
            then = saved_group["given"]
            changed = [key for key, value in given.items() if then.get(key, value) != value]
            self.overruled += [f"{key}={given[key]:g} (it was {then[key]:g})" for key in changed]

    def live_state(self) -> dict[str, Tensor]:
        return {f"optimizer/{name}": local(value) for name, value in self._slots() if _is_entry(value)}

    def _stored(self, keys: Iterable[str]) -> Iterator[tuple[Tensor, str, str, Mapping[str, Any]]]:
        """Yield parameter, slot, key and group for each of ``keys`` that is this optimizer's."""
        groups = self.optimizer.param_groups
        own = {self._names[parameter]: (parameter, group) for group in groups for parameter in group["params"]}
        for key in keys:
            name, _, slot = key.removeprefix(f"{OPTIMIZER}/").rpartition("/")
            if key.startswith(f"{OPTIMIZER}/") and name in own:
                parameter, group = own[name]
                yield parameter, slot, key, group

    def _slots(self) -> Iterator[tuple[str, Any]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                for slot, value in self.optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        yield f"{self._names[parameter]}/{slot}", value


def _is_entry(value: object) -> bool:
    return isinstance(value, Tensor) and not consists_of_tensors(value)


def _place_of(parameter: Tensor, slot: str, record: TensorRecord, settings: Mapping[str, Any]) -> Tensor:
    """Return a tensor as the optimizer makes it: sharded as the parameter is, if it has its shape."""
    dtype = getattr(torch, record.dtype)
    if record.shape == tuple(parameter.shape) and record.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_host = slot == "step" and not (settings.get("capturable") or settings.get("fused"))  # torch's own rule
    return torch.zeros(record.shape, dtype=dtype, device="cpu" if on_host else local(parameter).device)
