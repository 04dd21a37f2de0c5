"""The order of the calls by which a batch comes to a GPU. torch.cuda's calls are noted, as there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.unit.data.samples import Numbers
from toolkit.data import loader as module
from toolkit.data.loader import Loader, eval_batches
from toolkit.ranks.batch import Share


@dataclass
class Stream:
    name: str
    calls: list[str]

    def wait_stream(self, other: Stream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note what is asked of CUDA. Tensors stay where they are."""
    noted: list[str] = []
    on = ["compute"]

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        on.append(chosen.name)
        yield
        on.pop()

    def to(tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        assert non_blocking
        noted.append(f"copy on {on[-1]} to {device}")
        return tensor

    def record_stream(tensor: Tensor, used_on: Stream) -> None:
        noted.append(f"keep until {used_on.name} is done")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies", noted))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(on[-1], noted))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: noted.append("pin") or tensor)
    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    # a stream that an earlier test has made would be found in the cache
    module._copy_stream.cache_clear()
    yield noted
    module._copy_stream.cache_clear()


#: For a batch of Numbers, which has two tensors.
ORDER = [*["pin", "copy on copies to cuda:0", "keep until compute is done"] * 2, "compute waits for copies"]


class Bytes:
    """Samples of one byte each. They become numbers when a batch of them is on its device."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise AssertionError("batches are finished as a whole")

    def unfinished(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([index], dtype=torch.uint8), index

    def finish(self, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.calls.append(f"finish {data[0].dtype}")
        return data[0] / 255, data[1]


def test_a_training_batch_is_copied_beside_the_computation_which_waits_for_it(calls: list[str]) -> None:
    loader = Loader(Numbers(8), global_batch_size=4, seed=0, share=Share(0, 1), device="cuda:0")
    loader.at(0)
    assert calls == ORDER


def test_an_evaluated_batch_goes_the_same_way(calls: list[str]) -> None:
    assert len(list(eval_batches(Numbers(8), Share(0, 1), 4, device="cuda:0"))) == 2
    assert calls == ORDER * 2


def test_bytes_are_copied_as_bytes_and_finished_behind_the_wait(calls: list[str]) -> None:
    (batch,) = eval_batches(Bytes(calls), Share(0, 1), 8, device="cuda:0")
    assert calls == [*ORDER, "finish torch.uint8"]
    assert batch.inputs.dtype == torch.float32


def test_on_the_cpu_nothing_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "current_stream")
    loader = Loader(Numbers(8), global_batch_size=4, seed=0, share=Share(0, 1))
    assert len(loader.at(0)) == 4
