"""One process with its GPU: copies both ways, measuring, forks, exported programs, resumes."""

import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

from tests.dist.test_fork import Site
from tests.gpu import NO_GPU, throughput, training
from toolkit.checkpoint.exchange import ReplicaSums
from toolkit.checkpoint.writer import Staging
from toolkit.data.loader import Loader, _copy_stream
from toolkit.devices import page_locked
from toolkit.metrics.meters import stopwatch
from toolkit.plugins.inference.exported_program import write_program
from toolkit.ranks.batch import Share
from toolkit.ranks.state import Replicated

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]
DEVICE = torch.device("cuda", 0)
#: Clock cycles of a kernel that does nothing, for tenths of a second and for a second.
SHORT, LONG = 200_000_000, 2_000_000_000
ROUNDS = 7


def seconds(work: Callable[[], object]) -> float:
    """Return how long ``work`` takes until the GPU has done it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@pytest.mark.alone
def test_a_batch_is_on_the_gpu_before_the_step_before_it_is_done(note: Any) -> None:
    work = throughput.images(torch.nn.Identity, 224, 64, "fp32")
    kept = throughput.Kept(work)
    loader = Loader(kept, global_batch_size=64, seed=0, share=Share(0, 1), device=DEVICE)
    loader.at(0)  # makes the stream, and page-locks memory
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    slept = torch.cuda.Event()
    slept.record()
    began = time.perf_counter()
    batch = loader.at(1)
    note("host_s", time.perf_counter() - began)
    _copy_stream(DEVICE).synchronize()
    note("copied_s", time.perf_counter() - began)
    assert not slept.query(), "the copy has waited for the computation"
    assert torch.equal(batch.inputs.cpu(), kept.batches[2][0])
    assert slept.query(), "what uses the batch waits its turn"


def test_memory_of_a_batch_is_not_used_again_while_a_step_reads_it() -> None:
    work = throughput.images(torch.nn.Identity, 64, 64, "fp32")
    kept = throughput.Kept(work)
    loader = Loader(kept, global_batch_size=64, seed=0, share=Share(0, 1), device=DEVICE)
    loader.at(0)
    torch.cuda.synchronize()
    sums: list[tuple[Tensor, int]] = []
    for step in range(1, 9):
        torch.cuda._sleep(SHORT // 10)
        # The batch is let go of at once, long before its sum is computed.
        sums.append((loader.at(step).inputs.sum(dtype=torch.int64), (step + 1) % throughput.KEPT))
    for found, number in sums:
        assert found.item() == kept.batches[number][0].sum(dtype=torch.int64).item()


@pytest.mark.alone
def test_the_stopwatch_has_the_time_of_the_gpu_and_none_of_the_host(note: Any) -> None:
    watch = stopwatch(DEVICE)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # The host's time is that of the calls alone: the kernel runs while the host continues.
    host_s = 0.0
    began.record()
    for _ in range(5):
        at = time.perf_counter()
        watch.start()
        host_s -= at - time.perf_counter()
        torch.cuda._sleep(SHORT)
        at = time.perf_counter()
        watch.stop()
        host_s -= at - time.perf_counter()
    ended.record()
    found = watch.take()
    note("lap_s", found)
    note("host_us_per_lap", host_s / 5 * 1e6)
    assert found == pytest.approx(began.elapsed_time(ended) / 5 / 1000, rel=0.05)
    assert host_s / 5 < 1e-3


@pytest.mark.alone
def test_a_background_save_holds_the_gpu_no_longer_than_the_copy_to_pinned_memory(note: Any) -> None:
    """1 GiB in 16 tensors. The goal is 1.2 times the plain copies' time."""
    state = {f"w{number}": Replicated(torch.randn(1 << 24, device=DEVICE)) for number in range(16)}
    pinned = [torch.empty(1 << 24, pin_memory=True) for _ in state]
    staging = Staging()

    def plain() -> None:
        for target, entry in zip(pinned, state.values(), strict=True):
            target.copy_(entry.value, non_blocking=True)  # type: ignore[arg-type]

    note("first_s", seconds(partial(staging.copy, state, 0)))  # page-locks its memory
    plain()
    times = [(seconds(plain), seconds(partial(staging.copy, state, 0))) for _ in range(ROUNDS)]
    ratio = statistics.median(ours / theirs for theirs, ours in times)
    note("plain_GB_per_s", (1 << 30) / 1e9 / statistics.median(theirs for theirs, _ in times))
    note("of_plain", ratio)
    assert ratio <= 1.2


def test_a_save_has_the_values_of_its_step_though_the_next_one_changes_them() -> None:
    value = torch.ones(1 << 24, device=DEVICE)
    torch.cuda._sleep(SHORT)
    staged, wait = Staging().copy({"w": Replicated(value)}, 0)
    value.zero_()
    wait()
    assert staged["w"].value.min().item() == 1  # type: ignore[union-attr]


def test_sums_of_replicas_are_those_of_their_step_whichever_thread_reads_them() -> None:
    value = torch.ones(1 << 24, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # whose work no other stream waits for
        torch.cuda._sleep(SHORT)
        sums = ReplicaSums({"w": Replicated(value)})
        value.zero_()
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(sums.sums).result()
    assert found == ReplicaSums({"w": Replicated(torch.ones(1 << 24))}).sums()


def test_a_block_that_cannot_be_page_locked_leaves_no_error_for_the_next_kernel() -> None:
    buffer = mmap.mmap(-1, 1 << 20)
    assert page_locked.lock(buffer)
    assert not page_locked.lock(buffer), "it is page-locked already"
    assert torch.ones(4, device=DEVICE).sum().item() == 4
    page_locked.unlock(buffer)
    assert page_locked.lock(buffer)
    page_locked.unlock(buffer)


def test_a_state_of_many_sizes_takes_as_much_page_locked_memory_as_it_has() -> None:
    state = {str(size): Replicated(torch.full((size,), float(size), device=DEVICE)) for size in (1, 1000, 70_000)}
    block = page_locked.Block()
    places = block.buffers_like({name: entry.value for name, entry in state.items()})  # type: ignore[misc]
    assert all(place.is_pinned() for place in places.values())
    staged, wait = Staging().copy(state, 0)
    wait()
    assert all(torch.equal(staged[name].value, entry.value.cpu()) for name, entry in state.items())  # type: ignore[arg-type, union-attr]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.agents.close()


FORKED = """
import json, os, sys
was_there = "torch" in sys.modules
import torch
before = torch.cuda.is_initialized(), torch._C._cuda_isInBadFork()
index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
total = torch.ones(4, device=f"cuda:{index}").sum().item()
print(json.dumps([was_there, *before, torch.cuda.is_available(), total]))
"""


def test_a_forked_rank_has_torch_and_no_context_and_uses_its_gpu(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.folder / "forked.py").write_text(FORKED)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    happened = site.run_command(["python3", str(site.folder / "forked.py")])
    assert [event.exit_code for event in happened] == [0], site.log(0)
    for rank in range(2):
        assert json.loads(site.log(rank).splitlines()[-1]) == [True, False, False, True, 4.0]


def test_an_exported_program_computes_the_same_on_a_gpu(tmp_path: Path) -> None:
    model, example = training.small_images().eval(), torch.randn(4, 3, 8, 8)
    write_program(model, example, tmp_path / "model.pt2")
    program = move_to_device_pass(torch.export.load(tmp_path / "model.pt2"), "cuda").module()
    with torch.no_grad():
        torch.testing.assert_close(program(example.to(DEVICE)).cpu(), model(example), rtol=1e-3, atol=1e-3)


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    """On the GPUs, with deterministic algorithms, by the command that users have for it."""
    ranks = min(torch.cuda.device_count(), 2)
    words = ["configs/digits_ddp.yaml", "--steps", "30", "model.name=lenet", "train.deterministic=true"]
    words += [f"cluster.tasks_per_node={ranks}", "--executor", "local", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "resume-check", *words],
        env={**os.environ, "TOOLKIT_RUNS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] == "IDENTICAL"
