"""A package that gives torch a device that is none of CUDA's, as torch's notes on PrivateUse1 say.

It lies on PYTHONPATH with its compiled part and an entry point of the group ``torch.backends``. So torch loads it at
its own import. Nothing in the toolkit knows the name ``toy``.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "toy"


@contextmanager
def work_on(stream: torch.Stream) -> Iterator[None]:
    """Enqueue on ``stream``. In torch 2.6 a stream is no context."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def install() -> None:
    torch.utils.rename_privateuse1_backend(NAME)
    found = importlib.util.spec_from_file_location("toy_device_ext", Path(__file__).with_name("toy_device_ext.so"))
    native = importlib.util.module_from_spec(found)
    found.loader.exec_module(native)
    torch._register_device_module(NAME, _module(native))
    torch.utils.generate_methods_for_privateuse1_backend()


def _module(native: Any) -> ModuleType:
    """Return what is torch.toy: the names that torch asks of such a module, and those of torch.cuda that all have."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = module._is_compiled = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(torch.device(device).index)
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.Stream = lambda device: torch.Stream(device)
    module.stream = work_on
    module.Event = lambda enable_timing=False: torch.Event(NAME, enable_timing=enable_timing)
    module.default_generators = tuple(native.generator(index) for index in range(2))

    def own() -> torch.Generator:
        generator: torch.Generator = module.default_generators[module.current_device()]
        return generator

    module.manual_seed = lambda seed: own().manual_seed(seed)
    module.manual_seed_all = lambda seed: [each.manual_seed(seed) for each in module.default_generators]
    module.get_rng_state = lambda device=None: own().get_state()
    module.set_rng_state = lambda state, device=None: own().set_state(state)
    module.get_device_name = lambda device=None: "Toy 2000"
    module.max_memory_allocated = lambda device=None: native.peak()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]

    @contextmanager
    def device(wanted: int | torch.device) -> Iterator[None]:
        before = module.current_device()
        torch.accelerator.set_device_index(wanted if isinstance(wanted, int) else wanted.index)
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    module.device = device
    return module
