"""Random numbers of samples, and the generators that a script makes itself.

torchvision's transforms draw from the process-wide generators and accept no other generator. So those are seeded before
each *sample*, by the run's seed and the sample's position alone. Then neither the rank, the number of ranks or workers,
nor how far workers run ahead changes a pixel, and a resumed run needs no saved random state.

A script's own generators are torch's, ``random.Random``, and numpy's of both kinds. Their state is saved.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from toolkit.data.permutation import hash64

#: Keeps these seeds apart from those that other parts of the package hash from the same run seed.
_SAMPLE = 0x53414D50


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

#: So many objects of a loader are looked at, so many items of each list, and so deep.
_MOST, _ITEMS, _DEPTH = 2000, 100, 8
_LEAVES = (Tensor, np.ndarray, np.generic, ModuleType, type, str, bytes, int, float, type(None))


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


def generators_in(root: Any) -> list[RandomGenerator]:
    """Return the generators that a loader, its samplers, its data set and their functions hold."""
    found: dict[int, RandomGenerator] = {}
    seen: dict[int, Any] = {}
    waiting = [(root, 0)]
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
    if isinstance(thing, (list, tuple)):
        yield from thing[:_ITEMS]
    elif isinstance(thing, Mapping):
        yield from islice(thing.values(), _ITEMS)
    elif isinstance(thing, MethodType):
        yield thing.__self__
        yield thing.__func__
    elif isinstance(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, FunctionType):
        # What the function's code names: variables around it, and those of its module.
        yield from (cell.cell_contents for cell in thing.__closure__ or () if _is_full(cell))
        yield from (v for name in thing.__code__.co_names if is_generator(v := thing.__globals__.get(name)))
    elif not type(thing).__module__.startswith("torch.nn."):
        yield from getattr(thing, "__dict__", {}).values()
        if not type(thing).__module__.startswith(("torch.", "builtins")):
            yield from (value for value in vars(type(thing)).values() if isinstance(value, FunctionType))


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable has no value yet
        return False
