"""The switches of torch that the config sets for GPUs. The allocator's call is noted, as there is no GPU."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from toolkit.cli.keys import words_by_key
from toolkit.config import TrainConfig
from toolkit.data.randomness import ALLOCATOR_VARIABLES, apply_gpu_settings, reseed, seed_for_init
from toolkit.devices import accelerator


@pytest.fixture
def allocator_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the calls of torch's allocator, and restore the other switches afterwards."""
    calls: list[str] = []
    matmul = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(accelerator, "set_allocator", calls.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield calls
    torch.set_float32_matmul_precision(matmul)


def test_defaults_are_exact_products_and_timed_convolutions(allocator_calls: list[str]) -> None:
    apply_gpu_settings(TrainConfig())
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.benchmark
    assert allocator_calls == []


def test_deterministic_wins_over_timed_convolutions(allocator_calls: list[str]) -> None:
    apply_gpu_settings(TrainConfig(cudnn_benchmark=True, deterministic=True))
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("word", words_by_key()["train.float32_matmul"])
def test_each_word_for_products_is_one_of_torchs(allocator_calls: list[str], word: str) -> None:
    apply_gpu_settings(TrainConfig(float32_matmul=word))
    assert torch.get_float32_matmul_precision() == word


def test_what_is_asked_for_is_set(allocator_calls: list[str]) -> None:
    apply_gpu_settings(TrainConfig(float32_matmul="high", cudnn_benchmark=False, expandable_segments=True))
    assert torch.get_float32_matmul_precision() == "high"
    assert not torch.backends.cudnn.benchmark
    assert allocator_calls == ["expandable_segments:True"]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_an_allocator_that_the_user_has_configured_is_left_alone(
    allocator_calls: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    apply_gpu_settings(TrainConfig(expandable_segments=True))
    assert allocator_calls == []


def test_torch_takes_the_allocators_option() -> None:
    """The installed torch's own parser refuses an option that it does not know."""
    with pytest.raises((ValueError, RuntimeError), match="expandable_segment"):
        accelerator.set_allocator("expandable_segment:True")
    accelerator.set_allocator("expandable_segments:False")


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_a_step_draws_the_same_whatever_was_drawn_before() -> None:
    reseed(1, 7, 0)
    first = draws()
    torch.rand(100), random.random(), np.random.rand()
    reseed(1, 7, 0)
    assert draws() == first


def test_seed_step_and_share_each_change_every_generator() -> None:
    found = []
    for place in [(1, 7, 0), (2, 7, 0), (1, 8, 0), (1, 7, 1)]:
        reseed(*place)
        found.append(draws())
    seed_for_init(1)
    found.append(draws())
    assert all(len(set(values)) == 5 for values in zip(*found, strict=True))


def test_each_gpu_of_a_process_draws_its_own_numbers_and_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators of the CPU stand for those of three GPUs. The second GPU is the current one."""
    gpus = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)

    def numbers() -> list[float]:
        reseed(1, 7, 0)
        return [torch.rand((), generator=generator).item() for generator in [torch.default_generator, *gpus]]

    first = numbers()
    assert first == numbers()
    assert len(set(first)) == 3, "the current GPU has the seed of the process, the others have their own"
    assert first[0] == first[2]
