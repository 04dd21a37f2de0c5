"""Page-locked memory for copies from a GPU. torch.cuda's calls are noted, as there is no GPU."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from toolkit.checkpoint.writer import Staging
from toolkit.devices import page_locked
from toolkit.ranks.state import PerRank, Replicated, State

STATE: State = {
    "weight": Replicated(torch.arange(33_000, dtype=torch.float32)),
    "step": Replicated(torch.tensor(7.0)),
    "half": PerRank(torch.arange(77, dtype=torch.bfloat16).view(7, 11).t()),
    "none": Replicated(torch.empty(0, 3)),
    "epoch": Replicated(3),
}


@dataclass
class Cuda:
    """The calls made to CUDA, and the memory that is registered, by its address."""

    calls: list[str] = field(default_factory=list)
    locked: dict[int, int] = field(default_factory=dict)
    locked_on: list[int] = field(default_factory=list)
    refuses: bool = False
    current: threading.local = field(default_factory=threading.local)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 1
        self.locked_on.append(getattr(self.current, "device", 0))
        if self.refuses:
            return 2
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def holds(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at and at + tensor.nbytes <= start + size for start, size in self.locked.items())


class Event:
    def __init__(self, cuda: Cuda, blocking: bool) -> None:
        self.cuda, self.blocking = cuda, blocking

    def record(self) -> None:
        self.cuda.calls.append(f"record on {self.cuda.current.device}")

    def synchronize(self) -> None:
        assert self.blocking
        self.cuda.calls.append(f"wait on {getattr(self.cuda.current, 'device', 0)}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Play a process whose main thread has made GPU 3 current. All its tensors count as tensors on that GPU."""
    found = Cuda()
    found.current.device = 3

    @contextmanager
    def device(index: int) -> Iterator[None]:
        found.current.device = index
        yield

    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current.device)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(found, blocking))
    monkeypatch.setattr(Tensor, "is_cpu", False, raising=False)
    return found


def assert_is_copy(staged: State, expected: State) -> None:
    for name, entry in expected.items():
        value = staged[name].value
        assert torch.equal(value, entry.value) if isinstance(value, Tensor) else value == entry.value  # type: ignore[arg-type]


def test_a_state_on_a_gpu_is_copied_into_one_block_without_gaps(cuda: Cuda) -> None:
    staged, wait = Staging().copy(STATE, 0)
    wait()
    assert_is_copy(staged, STATE)
    tensors = [entry.value for entry in staged.values() if isinstance(entry.value, Tensor)]
    assert all(cuda.holds(tensor) for tensor in tensors if tensor.numel())
    assert all(tensor.data_ptr() % page_locked.ALIGNMENT == 0 for tensor in tensors)
    (size_bytes,) = cuda.locked.values()
    # torch's allocator would take 256 KiB for the 132,000 bytes of the weight alone.
    assert size_bytes <= sum(tensor.nbytes for tensor in tensors) + page_locked.ALIGNMENT * len(tensors)
    assert tensors[0].is_contiguous()


def test_the_block_is_kept_while_the_state_fits_and_given_back_when_it_grows(cuda: Cuda) -> None:
    staging = Staging()
    first, _ = staging.copy(STATE, 0)
    second, _ = staging.copy(STATE, 0)
    assert first["weight"].value.data_ptr() == second["weight"].value.data_ptr()  # type: ignore[union-attr]
    grown = {**STATE, "moment": Replicated(torch.ones(100_000))}
    third, _ = staging.copy(grown, 0)
    assert_is_copy(third, grown)
    assert len(cuda.locked) == 1, "the smaller block is not page-locked any more"
    assert cuda.holds(third["moment"].value)  # type: ignore[arg-type]
    # A state that shrinks stays in the block.
    assert_is_copy(staging.copy(STATE, 0)[0], STATE)
    assert len(cuda.locked) == 1


def test_the_writing_thread_waits_on_the_gpu_of_its_rank(cuda: Cuda) -> None:
    """A new thread's current GPU is 0. A wait there would make a context beside another rank's."""
    _, wait = Staging().copy(STATE, 0)
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert cuda.calls == ["record on 3", "wait on 3"]


def test_the_block_is_made_beside_the_first_save_on_the_gpu_of_the_rank(cuda: Cuda) -> None:
    staging = Staging()
    staging.allocate(STATE, 0)
    staged, _ = staging.copy(STATE, 0)
    assert_is_copy(staged, STATE)
    assert cuda.locked_on == [3], "one block, made by a thread"
    assert cuda.holds(staged["weight"].value)  # type: ignore[arg-type]


def test_an_error_of_cuda_is_not_left_for_the_next_kernel(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuses = True

    def launch(*_: object, device: str) -> Tensor:
        cuda.calls.append(f"kernel on {device}")
        raise RuntimeError("CUDA error: out of memory")  # the one that the registration has left

    monkeypatch.setattr(torch, "ones", launch)
    staged, _ = Staging().copy(STATE, 0)
    assert_is_copy(staged, STATE)
    assert cuda.calls == ["kernel on cuda", "record on 3"]
    assert "cannot be page-locked (CUDA error 2)" in caplog.text
    assert not cuda.locked


def test_a_state_in_host_memory_is_not_page_locked() -> None:
    staged, wait = Staging().copy(STATE, 0)
    wait()
    assert_is_copy(staged, STATE)


def test_a_copy_takes_no_new_memory_where_room_was_made() -> None:
    """New memory costs a page fault every 4 KiB, or every 2 MiB with huge pages."""
    state: State = {"weight": Replicated(torch.ones(2**24)), "epoch": Replicated(3)}

    def faults(staging: Staging) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert_is_copy(staging.copy(state, 0)[0], state)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with_room = Staging()
    with_room.allocate(state, 0)
    with_room.allocate(state, 0)
    with_room._making.join()
    assert 4 * faults(with_room) < faults(Staging())
