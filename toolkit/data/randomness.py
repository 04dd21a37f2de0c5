"""Random numbers as a function of the seed and the step, or the sample; and torch's switches for a whole process.

Before each step the process's generators are seeded anew. So the dropout mask of step 1000 is the same whether the run
came there in one attempt or in five, and whatever was drawn in between for logging or evaluation.

torchvision's transforms draw from the process-wide generators and accept no other generator. So those are seeded before
each *sample*, by the run's seed and the sample's position alone. Then neither the rank, the number of ranks or workers,
nor how far workers run ahead changes a pixel.

A script's own generators are torch's, ``random.Random``, and numpy's of both kinds. Their state is saved.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.base import logs
from toolkit.config import TrainConfig
from toolkit.data.permutation import hash64
from toolkit.devices import accelerator
from toolkit.devices.kinds import CPU

log = logs.get(__name__)

#: Tags that keep these seeds apart from those that other parts of the package hash from the same run seed.
_SAMPLE = 0x53414D50
_STEP = 0x53544550
_MODEL = 0x4D4F4445


def seed_sample(seed: int, position: int) -> None:
    """Seed the three generators for the sample at ``position``."""
    seed_cpu(hash64(_SAMPLE, seed, position))


def seed_cpu(word: int) -> None:
    """Seed torch's generator for the CPU, ``random`` and numpy's legacy one by 64 bits.

    It takes about 7 us. ``torch.manual_seed`` would take 100, most of it for devices that a data worker must not touch.
    """
    torch.default_generator.manual_seed(word >> 1)
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the three generators at the end. Loading in the training process must not disturb dropout."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


RandomGenerator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

#: What each module has, and not for its own class.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
#: So many objects of a loader are looked at, so many items of each list, and so deep.
_MOST, _ITEMS, _DEPTH = 2000, 100, 8
_LEAVES = (Tensor, np.ndarray, np.generic, ModuleType, str, bytes, int, float, type(None))


def is_generator(value: object) -> TypeGuard[RandomGenerator]:
    """True for a generator that can be seeded; the system's cannot."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def state_of(generator: RandomGenerator) -> Any:
    """Return the generator's state, of plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: RandomGenerator, state: Any) -> None:
    """Put back what :func:`state_of` has returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def origin_of(generator: RandomGenerator) -> int:
    """Return a number for the state that the script has given the generator."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return zlib.crc32(repr(state_of(generator)).encode())


def seed_generator(generator: RandomGenerator, word: int) -> None:
    """Seed the generator by 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(word >> 1)
    elif isinstance(generator, np.random.Generator):
        kind: Callable[[int], Any] = type(generator.bit_generator)
        generator.bit_generator.state = kind(word).state
    else:
        generator.seed(word & 0xFFFFFFFF)


#: The generators that a job and its model hold, each with a number for the state that the job has given it.
HELD: dict[RandomGenerator, int] = {}


def register_generators(generators: Iterable[RandomGenerator]) -> None:
    """Have these generators seeded before each step with those of the process, until the next job.

    They then draw other numbers on each share, as dropout does, and need no place in a checkpoint.
    """
    HELD.update((each, origin_of(each)) for each in generators)


def generators_of(module: nn.Module) -> list[RandomGenerator]:
    """Return the generators that a model's own layers hold. Torch's layers have none."""
    layers = [layer for layer in module.modules() if _is_of_the_script(type(layer).__module__)]
    held = (value for layer in layers for name, value in vars(layer).items() if name not in OF_EVERY_MODULE)
    return generators_in(*dict.fromkeys(map(type, layers)), *(each for each in held if not isinstance(each, _LEAVES)))


def generators_in(*roots: Any) -> list[RandomGenerator]:
    """Return the generators that ``roots`` hold, their functions, their classes and the user's functions they call."""
    found: dict[int, RandomGenerator] = {}
    seen: dict[int, Any] = {}
    waiting = [(root, 0) for root in roots]
    while waiting and len(seen) < _MOST:
        thing, depth = waiting.pop(0)
        if id(thing) in seen or isinstance(thing, _LEAVES):
            continue
        seen[id(thing)] = thing
        if is_generator(thing):
            found[id(thing)] = thing
        elif depth < _DEPTH:
            waiting += [(part, depth + 1) for part in _parts(thing)]
    return [*found.values()]


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from islice(thing, _ITEMS)
    elif isinstance(thing, Mapping):
        yield from islice(thing.values(), _ITEMS)
    elif isinstance(thing, MethodType):
        yield thing.__self__
        yield thing.__func__
    elif isinstance(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, (staticmethod, classmethod)):
        yield thing.__func__
    elif isinstance(thing, property):
        yield thing.fget
    elif isinstance(thing, FunctionType):
        yield from (thing.__defaults__, thing.__kwdefaults__)
        yield from (cell.cell_contents for cell in thing.__closure__ or () if _is_full(cell))
        if _is_of_the_script(thing.__module__):
            yield from _named_by(thing.__code__, thing.__globals__)
    elif isinstance(thing, type):
        for kind in thing.__mro__:
            yield from vars(kind).values() if _is_of_the_script(kind.__module__) else ()
    elif type(thing).__module__.startswith("torch.nn."):
        yield from getattr(thing, "_modules", {}).values()  # a Sequential of transforms, say
    else:
        yield from getattr(thing, "__dict__", {}).values()
        for kind in type(thing).__mro__:
            slots = vars(kind).get("__slots__", ())
            yield from (getattr(thing, slot, None) for slot in ([slots] if isinstance(slots, str) else slots))
        yield type(thing)


def _named_by(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what ``code`` and the functions within it name of a module's ``names``, and of modules among them."""
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, ModuleType):
            if _is_of_the_script(value.__name__):
                yield from (vars(value).get(attribute) for attribute in code.co_names)
        elif (
            isinstance(value, (FunctionType, type)) or is_generator(value) or _is_of_the_script(type(value).__module__)
        ):
            yield value
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _named_by(inner, names)


@lru_cache(maxsize=1000)
def _is_of_the_script(module: str) -> bool:
    """True for a module of the user's, as opposed to Python's own, installed ones and this package."""
    if module.partition(".")[0] in (*sys.stdlib_module_names, "torch", "numpy", "toolkit") and module != "__main__":
        return False
    parts = Path(getattr(sys.modules.get(module), "__file__", None) or "").parts
    return not {"site-packages", "dist-packages"} & {*parts}


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable has no value yet
        return False


def seed_for_init(seed: int, *, deterministic: bool = False) -> None:
    """Seed the generators before the model is made. Every rank then draws the same first weights.

    ``deterministic`` allows only algorithms that give the same bits every time; an operation without one raises.
    """
    HELD.clear()
    _seed_generators(hash64(_MODEL, seed))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def reseed(seed: int, step: int, share: int) -> None:
    """Seed the generators before a step. No two shares of a step, and no two steps, draw the same dropout masks."""
    _seed_generators(hash64(_STEP, seed, step, share))


def _seed_generators(word: int) -> None:
    """Seed torch's generators for the CPU and every GPU, ``random``, numpy's legacy one, and those of the job."""
    seed_cpu(word)
    accelerator.seed(word >> 1)
    for number, (generator, origin) in enumerate(HELD.items()):
        seed_generator(generator, hash64(word, origin, number))


#: Variables by which a user configures torch's allocator. The second is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def apply_gpu_settings(config: TrainConfig) -> None:
    """Set torch's switches as the config says. Call it before the model is made."""
    torch.set_float32_matmul_precision(config.float32_matmul)  # TF32 gives the same bits each time
    # With it cuDNN chooses its algorithms by their time, so other ones after a restart.
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and not config.deterministic
    if not config.expandable_segments or accelerator.kind() is CPU:
        return
    # What the user has set of the allocator is left alone.
    if theirs := [name for name in ALLOCATOR_VARIABLES if name in os.environ]:
        log.warning("train.expandable_segments is left to %s, which is set", theirs[0])
        return
    accelerator.set_allocator("expandable_segments:True")
