"""A keyed permutation of ``range(n)`` for each epoch, computed per position instead of stored.

The hash is the finalizer of splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014; constants of Stafford's variant 13). It is written out here because the order of a run must not change with a
library: numpy does not promise the same random stream in its next version, and a resumed run would then see some
samples of the epoch twice and others never.

Above ``SORTED_MAX`` items the permutation is a Feistel network on the smallest power of two that holds ``n``. A value
is walked along its cycle until it is below ``n`` (Black, Rogaway: "Ciphers with Arbitrary Finite Domains", CT-RSA
2002). With so few rounds it is visibly biased on small sets, so those are ordered by sorting a keyed hash.

Speed on one core: 20 to 60 ns an index in blocks of 16,384, up to 2,000 in blocks of 64. The sort takes about 5 ms for
65,536 items, once an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from toolkit.base.errors import ConfigError
from toolkit.data.fingerprint import crc

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

#: Up to this many items the whole epoch is ordered by a sort and kept.
SORTED_MAX = 65_536
#: Number of positions that are best generated at once above that.
BLOCK = 16_384

_ROUNDS = 6
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB


def mix(word: int) -> int:
    """Return splitmix64's finalizer of ``word``: a bijection of 64-bit words."""
    word = (word ^ (word >> 30)) * _MULTIPLY_1 & _MASK
    word = (word ^ (word >> 27)) * _MULTIPLY_2 & _MASK
    return word ^ (word >> 31)


def mix_array(words: Words) -> Words:
    """Apply :func:`mix` to each element in place; return ``words``."""
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(_MULTIPLY_1)
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= np.uint64(_MULTIPLY_2)
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words


def hash64(*parts: int) -> int:
    """Return a 64-bit hash of integers of any sign, in order. It is the same on every machine and in every version."""
    word = 0
    for part in parts:
        word = mix((word + _GOLDEN + part) & _MASK)
    return word


def order(n: int, seed: int, epoch: int, start: int, stop: int) -> Indices:
    """Return the items at positions ``start..stop`` of epoch ``epoch``, (stop-start,).

    They are part of a permutation of ``range(n)``. ``n`` may be up to 2**62. Raises ValueError for positions outside
    the epoch.
    """
    if not 0 <= start <= stop <= n:
        raise ValueError(f"positions {start}..{stop} are not within an epoch of {n} samples")
    return items(n, seed, epoch, np.arange(start, stop, dtype=np.int64))


def items(n: int, seed: int, epoch: int, places: Indices) -> Indices:
    """Return the items at ``places`` of one epoch, each in ``range(n)``."""
    if n <= SORTED_MAX:
        return _sorted_epoch(n, seed, epoch)[places]
    keys = [np.uint64(hash64(seed, epoch, number)) for number in range(1, _ROUNDS + 1)]
    # Encrypt, and encrypt again each result outside ``range(n)``.
    bits = (n - 1).bit_length()
    encrypted = _encrypt(places.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(encrypted >= n)
    while outside.size:
        encrypted[outside] = _encrypt(encrypted[outside], bits, keys)
        outside = outside[encrypted[outside] >= n]
    return encrypted.view(np.int64)


@lru_cache(maxsize=4)
def _sorted_epoch(n: int, seed: int, epoch: int) -> Indices:
    """Return a whole epoch: the items sorted by their keyed hash. The hash is one-to-one, so it has no ties."""
    key = np.uint64(hash64(seed, epoch))
    items = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + key
    return np.argsort(mix_array(items), kind="stable").astype(np.int64)


def _encrypt(values: Words, bits: int, keys: list[np.uint64]) -> Words:
    """Run one pass of the network on ``bits``-bit words. The two halves change each other in turn."""
    half = bits // 2
    low_bits = np.uint64(half)
    low_mask = np.uint64((1 << half) - 1)
    high_mask = np.uint64((1 << (bits - half)) - 1)
    high, low = values >> low_bits, values & low_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        high ^= mix_array(low + even) & high_mask
        low ^= mix_array(high + odd) & low_mask
    return (high << low_bits) | low


class ShuffledOrder:
    """The endless order of a training run: each epoch has its own permutation of ``range(n)``.

    With ``repeats`` each sample comes that many times in a row, and an epoch has only the first ``n / repeats`` of its
    permutation. Each batch of ``batch`` positions is then dealt out: its first copies come first, so that ranks get
    different copies of a sample (as in torchvision's RASampler; Hoffer et al. 2020).
    """

    def __init__(self, n: int, seed: int, *, repeats: int = 1, batch: int = 1) -> None:
        if n < 1:
            raise ConfigError("data: the training set is empty; it needs at least one sample")
        self.n = n
        self.seed = seed
        self._repeats = repeats
        places = np.arange(-(-batch // repeats) * repeats, dtype=np.int64).reshape(-1, repeats).T.ravel()
        self._dealt = places[places < batch]  #: place in a batch: the one whose sample it gets

    def at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions``, of any shape, counted from the beginning of the run."""
        if self._repeats > 1:
            within = positions % len(self._dealt)
            positions = positions - within + self._dealt[within]
        epochs = positions // self.n
        found = np.empty_like(positions)
        # Positions of one call may lie in several epochs.
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places = (positions[here] - epoch * self.n) // self._repeats
            found[here] = items(self.n, self.seed, epoch, places)
        return found


class GivenOrder:
    """The endless order that a job gives epoch by epoch, as data set indices. All epochs have one length."""

    def __init__(self, of_epoch: Callable[[int], Sequence[int]], dataset_size: int) -> None:
        """Ask for the first epoch, whose length all must have. Raises ConfigError.

        ``of_epoch(epoch)`` must return the same indices at every call, on every rank.
        """
        self._of_epoch = lru_cache(maxsize=2)(of_epoch)  # a batch may reach over the end of an epoch
        self._dataset_size = dataset_size
        first = self._epoch(0, None)
        self.n = len(first)
        self.digest = crc([first.tobytes()])  #: of the first epoch: a resume compares it with its own

    def at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions``, of any shape, counted from the run's beginning. Raises ConfigError."""
        epochs = positions // self.n
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = self._epoch(epoch, self.n)[positions[here] - epoch * self.n]
        return indices

    def _epoch(self, epoch: int, length: int | None) -> Indices:
        given = np.asarray(self._of_epoch(epoch))
        # The job's own code may return anything.
        if given.ndim != 1 or not given.size or given.dtype.kind not in "iu":
            raise ConfigError(
                f"data: order({epoch}) of the job is not a list of indices: it has {given.dtype} {given.shape}"
            )
        if length not in (None, given.size):
            raise ConfigError(f"data: order({epoch}) of the job has {given.size} samples, and order(0) {length}")
        if given.min() < 0 or given.max() >= self._dataset_size:
            raise ConfigError(
                f"data: order({epoch}) of the job goes from {given.min()} to {given.max()}, and the data set has "
                f"{self._dataset_size} samples"
            )
        return given.astype(np.int64)
