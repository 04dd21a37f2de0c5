"""The accelerator that torch here is built for: its kind, its devices, and torch's module of it.

`torch.accelerator` says which one it is. Streams, events, memory and random numbers are asked of torch's module of the
device's type (``torch.cuda``, ``torch.xpu``, or what a package has registered), which have the same names in all.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from toolkit import registry
from toolkit.devices import kinds
from toolkit.devices.kinds import CPU, DeviceKind


@cache
def built_for() -> DeviceKind:
    """Return the kind of devices that this torch is built for; CPU if for no other. Opens no device."""
    found = _built_for()
    if found is None:
        return CPU
    if getattr(torch.version, "hip", None):
        return kinds.ROCM
    # Other packages are asked last: to find that none brings a type, all installed packages are searched.
    known: DeviceKind | None = next((kind for kind in kinds.GPUS if kind.type == found.type), None)
    known = known or registry.find("devices", found.type)
    if known is not None:
        return known
    # A package that registers a device with torch may register a process group for it.
    from torch import distributed as dist

    return DeviceKind(found.type, found.type, dist.Backend.default_device_backend_map.get(found.type, CPU.backend))


def _built_for() -> torch.device | None:
    if "check_available" in inspect.signature(torch.accelerator.current_accelerator).parameters:
        return torch.accelerator.current_accelerator()
    # torch 2.6 reports nothing where no device is there.
    own = torch._C._get_privateuse1_backend_name()
    if own != "privateuseone":
        return torch.device(own)
    if torch.version.cuda or torch.version.hip:
        return torch.device("cuda")
    return torch.device("xpu") if torch.version.xpu else None


def kind() -> DeviceKind:
    """Return the kind of devices that a rank here trains on: the CPU where torch sees no other."""
    return built_for() if count() else CPU


def count() -> int:
    """Return how many devices this process sees; 0 without an accelerator."""
    module = _module()
    # NVML also counts GPUs that CUDA cannot open, as under a driver that is too old for this torch.
    return int(module.device_count()) if module is not None and module.is_available() else 0


def build() -> str:
    """Return torch's version and what it is built for, for messages."""
    of = built_for()
    version = torch.version.hip if of is kinds.ROCM else torch.version.cuda if of is kinds.CUDA else ""
    return f"torch {torch.__version__}, built for {f'{of.name} {version}'.strip()}"


def why_none() -> str:
    """Return torch's own words on why it sees no device: an old driver, no GPU on the bus. Empty without any."""
    try:
        with suppress(AttributeError):  # not every module has it
            module_of(torch.device(built_for().type)).init()
    except Exception as error:  # of the driver
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


@cache
def module_of(device: torch.device) -> Any:
    """Return torch's module for devices of this type, such as `torch.cuda`."""
    return torch.get_device_module(device)


@cache
def with_streams(device: torch.device) -> Any:
    """Return torch's module for this device if work there is enqueued; None for the CPU and without streams."""
    if device.type in ("cpu", "meta"):
        return None
    module = module_of(device)
    return module if hasattr(module, "current_stream") else None


def is_in_bad_fork() -> bool:
    """True if this process is a fork of one that has opened a device, or has asked the runtime about them."""
    of = built_for()
    tells = getattr(module_of(torch.device(of.type)), "_is_in_bad_fork", None)
    return bool(tells and tells())


def name_of(device: torch.device) -> str:
    """Return the model of a device that is not the CPU; its type where torch does not tell."""
    with suppress(AttributeError):
        return str(module_of(device).get_device_name(device))
    return device.type


def identities(number: int) -> list[str]:
    """Return names of the first ``number`` devices that hold in every process of the node."""
    properties = getattr(_module(), "get_device_properties", lambda index: None)
    # Without an id of the device itself: what a variable of this rank calls it.
    words = [word for _, named in kinds.visible_words(built_for(), os.environ) for word in named][-number:]
    names = words if len(words) == number else map(str, range(number))
    return [str(getattr(properties(index), "uuid", name)) for index, name in enumerate(names)]


def memory_peak_bytes(device: torch.device) -> int | None:
    """Return the most memory that this process has allocated there; None where torch does not tell."""
    with suppress(AttributeError):
        return int(module_of(device).max_memory_allocated(device))
    return None


@cache
def _module() -> Any:
    """Return torch's module of the accelerator; None for a torch without one."""
    of = built_for()
    return None if of is CPU else module_of(torch.device(of.type))


def opened() -> Any:
    """Return torch's module of the accelerator if this process has opened a device, else None.

    A look at random numbers must not open one: it would take some hundred MB of another rank's device.
    """
    module = _module()
    return module if module is not None and module.is_initialized() else None


def seed(number: int) -> None:
    """Seed the generators of all devices, if one has been opened. The current one gets ``number``, whatever its index.

    Only ``strategy.name: dp`` uses others: with equal numbers the parts of a batch would have equal dropout masks.
    """
    module = opened()
    if module is None:
        return
    current = module.current_device()
    for index, generator in enumerate(module.default_generators):
        generator.manual_seed(number ^ index ^ current)


def random_states() -> Iterator[torch.Tensor]:
    """Yield the random state of the current device, if one has been opened."""
    module = opened()
    if module is not None:
        yield module.get_rng_state()


def forked_rng() -> Any:
    """Return a context at whose end torch's random state is as before, on the CPU and on the current device."""
    module = opened()
    if module is None:
        return torch.random.fork_rng([])
    return torch.random.fork_rng([module.current_device()], device_type=built_for().type)


def set_allocator(settings: str) -> None:
    """Give the devices' allocator ``settings``, as in ``PYTORCH_ALLOC_CONF``."""
    of_any: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if of_any is None:  # torch < 2.9, which has it for CUDA and ROCm alone
        module: Any = _module()
        of_any = module.memory._set_allocator_settings
    of_any(settings)
