"""State of any object as JSON and tensors: what ``state_dict()`` returns, stored without pickle.

:func:`encode` turns nested builtin containers, numbers, texts, bytes, tensors and numpy arrays into JSON, with the
tensors beside it. :func:`decode` gives back equal values of the same types. A type that JSON does not have is written
as a mapping with one key that begins with ``$``. Anything else is an error that names its place, such as
``scheduler.lr_lambdas[0]``.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.base.errors import ConfigError
from toolkit.checkpoint.manifest import Manifest
from toolkit.ranks.state import Entry, Json, PerRank, Replicated


def encode(value: Any, where: str, tensors: list[Tensor]) -> Json:
    """Return ``value`` as JSON, and append its live tensors to ``tensors``.

    Raises ConfigError for what cannot be stored, with its place, which begins with ``where``.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    # By exact type: numpy's float64 is a float as well, and belongs to the arrays below.
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    # Lists, and mappings with plain keys, are JSON already; other containers get a key with ``$``.
    if type(value) is list:
        return [encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
    if type(value) is dict and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
    for word, kind, take_apart, _ in _KINDS:
        if type(value) is kind:
            items = enumerate(take_apart(value))
            return {word: [encode(item, f"{where}[{index}]", tensors) for index, item in items]}
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
    if consists_of_tensors(value):
        return {"$subclass": _encode_subclass(value, where, tensors)}
    if isinstance(value, DTensor):
        raise ConfigError(f"run.resumable: {where} is a DTensor; only a module's and an optimizer's can be resharded")
    word = "$tensor"
    if not isinstance(value, Tensor):
        word = "$array" if isinstance(value, np.ndarray) else "$scalar"
        try:
            value = torch.from_numpy(np.array(value))  # a copy in C order
        except TypeError:
            raise ConfigError(f"run.resumable: {where} is an array of {value.dtype}, which torch has not") from None
    elif value.device.type != "cpu":
        word = "$device"
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


def _in_order(value: Iterable[Any]) -> list[Any]:
    return sorted(value, key=repr)


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


def _on_device(tensor: Tensor) -> Tensor:
    """Return the tensor on the rank's GPU, where it was saved from; on the CPU where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return tensor if device is None else tensor.to(device)


_DECODERS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "$float": lambda inner, tensors: float(inner),
    "$bytes": lambda inner, tensors: base64.b64decode(inner),
    "$dtype": lambda inner, tensors: getattr(torch, inner),
    "$tensor": lambda inner, tensors: tensors[inner],
    "$device": lambda inner, tensors: _on_device(tensors[inner]),
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
