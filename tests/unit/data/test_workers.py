"""Data workers are separate processes. Each test here forks one or two and ends them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.data.samples import Damaged, Noisy
from toolkit.base import signals
from toolkit.base.errors import JobFailedError
from toolkit.data.loader import Loader, eval_batches
from toolkit.data.permutation import order
from toolkit.data.workers import stacked
from toolkit.ranks.batch import Batch, Share

DEADLINE_S = 20.0


@contextmanager
def running(dataset: Any, workers: int, *, batch: int = 6, most: int | None = None) -> Iterator[Loader]:
    share = Share(0, 1)
    loader = Loader(dataset, global_batch_size=batch, seed=3, share=share, workers=workers, max_bad_samples=most)
    try:
        yield loader
    finally:
        loader.close()


def batch_at(loader: Loader, step: int) -> Batch:
    batch = loader.at(step)
    assert batch is not None
    return batch


def worker_pids() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_any_number_of_workers_gives_identical_tensors() -> None:
    steps = [0, 1, 2, 7, 3, 4]  # in sequence, forward, back
    seen = []
    for workers in (0, 1, 2):
        with running(Noisy(20), workers) as loader:
            seen.append(torch.stack([batch_at(loader, step).inputs for step in steps]))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


class Mixed(Noisy):
    """Small and large tensors of several kinds."""

    def __getitem__(self, index: int) -> Any:
        return {"few": index, "row": torch.arange(3) + index, "many": torch.full((4096,), index), "real": 0.5 * index}


def test_a_worker_sends_a_few_whole_numbers_as_they_are_and_shares_the_rest() -> None:
    with running(Mixed(20), 0) as inline, running(Mixed(20), 1) as loader:
        expected, batch = batch_at(inline, 0), batch_at(loader, 0)
    assert {key: tensor.tolist() for key, tensor in batch.data.items()} == {
        key: tensor.tolist() for key, tensor in expected.data.items()
    }
    assert [key for key, tensor in batch.data.items() if tensor.is_shared()] == ["many", "real"]
    assert not batch.positions.is_shared()
    batch["few"][0] = 7  # it may be written to
    assert batch["few"][0] == 7


def test_workers_stay_through_the_run_and_end_with_the_loader() -> None:
    with running(Noisy(20), 2) as loader:
        loader.at(0)
        pids = worker_pids()
        assert len(pids) == 2
        for step in (1, 2, 30, 31, 5):
            assert batch_at(loader, step).positions[0] == step * 6
        assert worker_pids() == pids
    assert worker_pids() == set()


def test_workers_of_a_loader_that_nobody_closed_end_when_it_is_gone() -> None:
    loader = Loader(Noisy(20), global_batch_size=6, seed=3, share=Share(0, 1), workers=1)
    loader.at(0)
    assert len(worker_pids()) == 1
    del loader
    assert worker_pids() == set()


def test_workers_leave_the_process_generator_and_handlers_alone() -> None:
    on_death = signal.getsignal(signal.SIGCHLD)
    state = torch.get_rng_state()
    with running(Noisy(20), 1) as loader:
        loader.at(0)
        assert torch.equal(torch.get_rng_state(), state)
        # torch's own handler would raise wherever the main thread is, in the middle of a checkpoint for one
        assert signal.getsignal(signal.SIGCHLD) is on_death


class Signalled(Noisy):
    """A data set that gets signals while it loads. They are those that Slurm sends to all processes of a job."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        for number in signals.STOP_SIGNALS:
            os.kill(os.getpid(), number)
        return super().__getitem__(index)


def test_signals_to_all_processes_neither_end_workers_nor_reach_the_rank() -> None:
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    reader, writer = os.pipe2(os.O_NONBLOCK)
    wakeup = signal.set_wakeup_fd(writer)
    try:
        handler = signals.install()
        with running(Signalled(20), 1) as loader:
            assert torch.equal(batch_at(loader, 0).inputs, batch_at(unworked(Noisy(20)), 0).inputs)
            with pytest.raises(BlockingIOError):  # a worker that kept the wake-up pipe would have written here
                os.read(reader, 1)
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, earlier in before.items():
            signal.signal(number, earlier)
        os.close(reader)
        os.close(writer)
    assert handler.first is None


def unworked(dataset: Any) -> Loader:
    return Loader(dataset, global_batch_size=6, seed=3, share=Share(0, 1))


class Threads(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([torch.get_num_threads()]), index


def test_workers_compute_with_one_thread() -> None:
    with running(Threads(6), 1) as loader:
        assert set(batch_at(loader, 0).inputs.flatten().tolist()) == {1}


def test_a_sample_that_raises_in_a_worker_is_named_first() -> None:
    position = order(6, 3, 0, 0, 6).tolist().index(5)
    with running(Damaged(6, {5}), 1) as loader, pytest.raises(JobFailedError) as caught:
        loader.at(0)
    assert str(caught.value).startswith(f"sample 5 of the data set (position {position} of the run) cannot be loaded")
    assert "in __getitem__" in "".join(caught.value.__notes__)  # the worker's traceback is kept


def test_a_replaced_sample_is_told_by_a_worker_with_the_batch() -> None:
    seen = []
    for workers in (0, 1):
        with running(Damaged(20, {5, 7}), workers, most=9) as loader:
            seen.append([batch_at(loader, step) for step in (0, 1, 2, 3, 9)])
    for alone, worked in zip(*seen, strict=True):
        assert torch.equal(alone.inputs, worked.inputs)
        assert alone.bad == worked.bad
    assert {bad.index for batch in seen[1] for bad in batch.bad} == {5, 7}


@pytest.fixture
def torchs_handler_away() -> Iterator[None]:
    """Take torch's handler for a child's death away, which the first DataLoader of the process leaves for ever."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


class Deadly(Noisy):
    """A data set whose sample ``fatal`` kills the process that reads it.

    The process dies as under the out-of-memory killer, once ``gate`` is open.
    """

    def __init__(self, size: int, fatal: int, gate: Any) -> None:
        super().__init__(size)
        self.fatal = fatal
        self.gate = gate

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.fatal:
            self.gate.wait(DEADLINE_S)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("most", [None, 9], ids=["fail", "skip"])  # a dead worker is no bad sample
@pytest.mark.usefixtures("torchs_handler_away")  # it would raise in this test, wherever that is at the moment
@pytest.mark.chaos
def test_a_worker_that_dies_is_reported_with_the_sample_it_was_loading(most: int | None) -> None:
    fatal = int(order(18, 3, 0, 8, 9)[0])  # position 8 is in step 1, which the worker loads ahead
    gate = multiprocessing.get_context("fork").Event()
    with running(Deadly(18, fatal, gate), 1, most=most) as loader:
        loader.at(0)
        gate.set()
        wait_until(lambda: not worker_pids())
        with pytest.raises(JobFailedError, match=rf"step 1,.*sample {fatal} of the data set \(position 8 of the run\)"):
            loader.at(1)


def test_a_worker_that_closes_its_connection_long_before_its_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives much memory back. The error of its connection would read as if another rank had ended."""

    def reset(_: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    with running(Noisy(18), 1) as loader:
        loader.at(0)
        monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__next__", reset)
        with pytest.raises(JobFailedError, match=r"a data worker died \(pid unknown\).*reset by peer\. Worker 0 was"):
            loader.at(1)


class Stuck(Noisy):
    """A data set whose reading never returns, as with a file server that is down."""

    def __init__(self, size: int, started: Any) -> None:
        super().__init__(size)
        self.started = started

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.started.release()
        signal.pause()
        raise AssertionError("woken")


def _rank(started: Any) -> None:
    loader = Loader(Stuck(20, started), global_batch_size=6, seed=3, share=Share(0, 1), workers=2)
    loader.at(0)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads
def test_workers_of_a_killed_rank_die_with_it() -> None:
    """Surviving workers would hold the rank's sockets open. Its peers would wait instead of failing."""
    fork: Any = multiprocessing.get_context("fork")
    started = fork.Semaphore(0)
    rank = fork.Process(target=_rank, args=(started,))
    rank.start()
    assert started.acquire(timeout=DEADLINE_S)
    assert started.acquire(timeout=DEADLINE_S)
    pids = [int(pid) for pid in Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()]
    assert len(pids) == 2
    assert all(map(_is_running, pids))
    rank.kill()
    rank.join()
    try:
        wait_until(lambda: not any(map(_is_running, pids)))
    finally:
        for pid in filter(_is_running, pids):  # stuck for good where the test fails
            os.kill(pid, signal.SIGKILL)


def test_evaluation_with_workers_equals_evaluation_without_and_ends_them() -> None:
    with_workers, without = (list(eval_batches(Noisy(11), Share(1, 2), 2, workers=workers)) for workers in (1, 0))
    assert len(with_workers) == len(without) == 3
    for ours, theirs in zip(with_workers, without, strict=True):
        assert torch.equal(ours.inputs, theirs.inputs)
    assert worker_pids() == set()


def test_an_evaluation_left_early_ends_its_workers() -> None:
    batches = eval_batches(Noisy(20), Share(0, 1), 2, workers=1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert worker_pids() == set()


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([(torch.zeros(3), 1), (torch.zeros(5), 1)], r"batch\[0\] has the shapes \(3,\) and \(5,\) in two samples"),
        ([{"x": {"y": torch.zeros(3)}}, {"x": {"y": torch.zeros(5)}}], r"batch\['x'\]\['y'\] has the shapes"),
        ([{"x": 1}, {"z": 1}], r"batch has 'x' in one sample only"),
        ([(1, [1, 2]), (1, [1, 2, 3])], r"batch\[1\] has 2 elements in one sample, 3 in another"),
        ([(1, 2), [1, 2]], "batch is a tuple in one sample, a list in another"),
        ([(torch.zeros(2), None)] * 2, r"batch\[1\] is a NoneType: .*"),
    ],
)
def test_samples_that_cannot_be_stacked_are_refused_by_their_place(samples: list[Any], words: str) -> None:
    with pytest.raises(JobFailedError, match=words):
        stacked(samples)
