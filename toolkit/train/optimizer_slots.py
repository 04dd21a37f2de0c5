"""An optimizer's state by parameter names, as the loop's checkpoints hold it (``optim/<parameter>/<slot>``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit.base.errors import ConfigError, listing
from toolkit.checkpoint.manifest import Manifest, TensorRecord
from toolkit.ranks.state import Entry, Json, Replicated
from toolkit.strategies.layouts import entry, local
from toolkit.train import plain_state

OPTIMIZER, GROUPS = "optim", "groups"


class OptimizerSlots:
    """An optimizer's state under parameter names, and the settings of its groups, which schedulers change."""

    def __init__(self, name: str, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        self._name, self._at, self.optimizer, self._names = name, f"{GROUPS}/{name}", optimizer, names
        self._filled: dict[str, list[Tensor]] = {}  #: by slot or settings, the places of tensors in them
        self._handed_over = self._names_by_group()

    def _names_by_group(self) -> list[list[str]]:
        """Return the names of each group's parameters. Raises ConfigError for those of other models."""
        # A parameter made before its module was wrapped or moved is not the model's any more.
        unknown = [parameter for parameter in self.parameters() if parameter not in self._names]
        if unknown:
            shapes = listing([str(tuple(parameter.shape)) for parameter in unknown], 3)
            raise ConfigError(
                f"run.resumable: {self._name} has {len(unknown)} parameters of no model that was handed over (of shape "
                f"{shapes}): hand over their module as well, and make the optimizer after DDP, fully_shard and .to()"
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
                entries |= plain_state.entries_of(key, Replicated, plain_state.encode(value, key, tensors), tensors)
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
            settings = plain_state.encode(plain, f"{self._name}.param_groups[{index}]", tensors)
            groups.append({"parameters": len(names[index]), "names": names[index], "settings": settings})
        record: Json = {"class": type(self.optimizer).__name__, "groups": groups}
        return entries | plain_state.entries_of(self._at, Replicated, record, tensors)

    def places(self, manifest: Manifest) -> dict[str, Entry]:
        # There may be the places, and the added groups, of a checkpoint that turned out to be damaged.
        self.optimizer.state.clear()
        self._add_groups(manifest)
        self._filled = {self._at: plain_state.places_of(self._at, manifest)}
        entries = plain_state.entries_of(self._at, Replicated, None, self._filled[self._at])
        for parameter, slot, key, settings in self._stored([*manifest.tensors, *manifest.values]):
            if record := manifest.tensors.get(key):
                value = self.optimizer.state[parameter][slot] = _place_of(parameter, slot, record, settings)
                entries[key] = entry(value)
            else:
                self._filled[key] = plain_state.places_of(key, manifest)
                entries |= plain_state.entries_of(key, Replicated, None, self._filled[key])
        return entries

    def _add_groups(self, manifest: Manifest) -> None:
        """Add the groups that the script had added until the save. It does not pass that line again."""
        del self.optimizer.param_groups[len(self._handed_over) :]
        saved = manifest.values.get(self._at)
        parameters = {name: parameter for parameter, name in self._names.items()}
        for group in saved.value["groups"][len(self._handed_over) :] if saved is not None else ():
            missing = [name for name in group.get("names", ()) if name not in parameters]
            if missing:
                raise ConfigError(
                    f"run.resumable: a group that was added to {self._name} has parameters of no model that was handed "
                    f"over: {listing(missing, 3)}"
                )
            if "names" in group:  # not in checkpoints of older versions
                self.optimizer.add_param_group({"params": [parameters[name] for name in group["names"]]})

    def loaded(self, values: Mapping[str, Json]) -> None:
        """Put the values and settings back. Raises ConfigError where the checkpoint is another optimizer's."""
        for parameter, slot, key, _ in self._stored(values):
            self.optimizer.state[parameter][slot] = plain_state.decode(values[key], self._filled[key])
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
            for key, value in plain_state.decode(saved_group["settings"], self._filled[self._at]).items():
                if isinstance(group.get(key), Tensor):  # a learning rate of a captured graph, read in place
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def live(self) -> dict[str, Tensor]:
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
    return isinstance(value, Tensor) and not plain_state.consists_of_tensors(value)


def _place_of(parameter: Tensor, slot: str, record: TensorRecord, settings: Mapping[str, Any]) -> Tensor:
    """Return a tensor as the optimizer would have made it. It is sharded as the parameter is, if it has its shape."""
    dtype = getattr(torch, record.dtype)
    if record.shape == tuple(parameter.shape) and record.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_host = slot == "step" and not (settings.get("capturable") or settings.get("fused"))  # torch's own rule
    return torch.zeros(record.shape, dtype=dtype, device="cpu" if on_host else local(parameter).device)
