"""Decoded images in shared memory. The same batches without the files, for any process of a node, within a bound."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from toolkit.base.errors import ConfigError
from toolkit.config import DataConfig, ImageConfig
from toolkit.data.datasets import build_datasets
from toolkit.data.loader import Loader
from toolkit.nodes.agent import state_memory
from toolkit.plugins.formats.images.photographs import PixelCache
from toolkit.ranks.batch import Share


def picture(number: int, height: int = 20) -> Tensor:
    return torch.full((height, 30, 3), number, dtype=torch.uint8)


def in_a_child(work: Callable[[], object]) -> None:
    """Run ``work`` in a fork, which ends without any clean-up, as a killed one does."""
    pid = os.fork()
    if pid == 0:
        os._exit(work() is not None)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> state_memory.NodeFiles:
    files = state_memory.NodeFiles()
    monkeypatch.setenv(state_memory.PIXELS, files.pixels)
    return files


def test_what_does_not_fit_is_not_kept() -> None:
    cache = PixelCache(10, 3 * picture(0).numel() + 100, "a")
    for number in range(10):
        cache.put(number, picture(number))
    kept = [cache.get(number) for number in range(10)]
    assert [pixels is not None for pixels in kept] == [True] * 3 + [False] * 7
    assert all(torch.equal(pixels, picture(number)) for number, pixels in enumerate(kept) if pixels is not None)
    cache.put(9, picture(9)[:1, :10])  # a small one has room
    assert torch.equal(cache.get(9), picture(9)[:1, :10])


def test_ranks_of_a_node_share_one_cache_and_those_that_start_again_find_it(agent: state_memory.NodeFiles) -> None:
    in_a_child(lambda: PixelCache(4, 10_000, "a").put(2, picture(2)))
    again = PixelCache(4, 10_000, "a")
    assert torch.equal(again.get(2), picture(2))
    assert again.get(1) is None
    other = PixelCache(4, 10_000, "b")
    other.put(1, picture(7))
    assert (other.get(2), again.get(1)) == (None, None)


def test_a_worker_that_dies_with_the_lock_stops_nobody(agent: state_memory.NodeFiles) -> None:
    cache = PixelCache(4, 10_000, "a")
    in_a_child(lambda: cache._locked().__enter__())
    cache.put(0, picture(3))
    assert torch.equal(cache.get(0), picture(3))


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.images\.cache_gb: .* is more than the .* GB of memory"):
        PixelCache(4, 1 << 50, "a")


def test_the_second_epoch_has_the_same_pixels_and_needs_no_file(tmp_path: Path, agent: state_memory.NodeFiles) -> None:
    draw = np.random.default_rng(0)
    for number in range(8):
        for part in ("train", "val"):
            path = tmp_path / part / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (30, 40 + number, 3), dtype=np.uint8)).save(path)

    def epochs(images: ImageConfig, workers: int) -> tuple[Loader, list[Tensor]]:
        config = DataConfig("image_folder", str(tmp_path), image_size=24, augment=True, images=images)
        loader = Loader(build_datasets(config).train, global_batch_size=8, seed=0, share=Share(0, 1), workers=workers)
        return loader, [loader.at(step).inputs for step in range(2)]

    _, expected = epochs(ImageConfig(), 0)
    with closing(epochs(ImageConfig(cache_gb=0.01), 2)[0]):
        for path in tmp_path.glob("train/*/*.jpg"):
            # an empty file cannot be decoded: all pixels of the next epoch come from memory
            path.write_bytes(b"")
        _, found = epochs(ImageConfig(cache_gb=0.01), 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
