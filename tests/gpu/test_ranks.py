"""Ranks on GPUs: their process group, their devices, and trainings beside hand-written ones."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.dist.ranks import run_ranks
from tests.gpu import NO_GPU, throughput, training
from toolkit.checkpoint.writer import Staging
from toolkit.config import DistConfig
from toolkit.ranks.session import Session
from toolkit.ranks.state import Replicated

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]


def world() -> int:
    """Return how many ranks are started: one for each GPU, four at most."""
    return min(torch.cuda.device_count(), 4)


def group_facts(session: Session) -> dict[str, Any]:
    ones = torch.ones(1 << 20, device=session.device)
    dist.all_reduce(ones)
    return {
        "backend": dist.get_backend(),
        "device": session.device.index,
        "current": torch.cuda.current_device(),
        "bound": str(distributed_c10d._get_default_group().bound_device_id),
        "sum": ones.mean().item(),
    }


def test_each_rank_has_a_gpu_of_its_own_and_a_group_of_nccl_bound_to_it() -> None:
    for rank, facts in enumerate(run_ranks(world(), group_facts, job=DistConfig())):
        expected = {"backend": "nccl", "device": rank, "current": rank, "bound": f"cuda:{rank}", "sum": world()}
        assert facts == expected


@pytest.mark.parametrize("name", training.CASES)
def test_a_training_has_the_losses_of_a_loop_by_hand(name: str) -> None:
    case = training.CASES[name]
    for rank, (found, expected) in enumerate(run_ranks(world(), training.both, case, job=DistConfig())):
        assert found["device"] == f"cuda:{rank}"
        assert found["losses"] == pytest.approx(expected, rel=case.tolerance)
        assert found["fused"] == case.is_fused


def others_contexts(session: Session) -> list[int]:
    """Return other ranks' GPUs on which this process has a context. Before, threads made room and waited for a copy."""
    state = {"w": Replicated(torch.ones(1 << 20, device=session.device))}
    staging = Staging()
    staging.allocate(state, session.rank)
    _, wait = staging.copy(state, session.rank)
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    indices = [index for index in range(torch.cuda.device_count()) if index != session.device.index]
    return [index for index in indices if torch._C._cuda_hasPrimaryContext(index)]


def test_the_thread_that_writes_a_save_makes_no_context_on_another_ranks_gpu() -> None:
    assert run_ranks(world(), others_contexts, job=DistConfig()) == [[]] * world()


#: torch 2.15 has two: its default is new, and the one before has another name.
NCCLS = ["nccl", *["nccl-legacy"] * hasattr(distributed_c10d, "_register_builtin_nccl_legacy_backend")]


@pytest.mark.parametrize("backend", NCCLS)
def test_the_report_of_a_hang_has_the_last_collectives(backend: str) -> None:
    for text, names in run_ranks(world(), training.hang_report, job=DistConfig(backend)):
        assert "in hang_report" in text
        assert sum("all" in name.lower() and "reduce" in name.lower() for name in names) >= 3, names


@pytest.mark.parametrize("name", training.TRAINS)
def test_the_host_does_not_wait_for_the_gpu_between_logging_steps(name: str) -> None:
    assert run_ranks(world(), training.steps_without_sync, training.TRAINS[name], job=DistConfig()) == [20] * world()


def race(session: Session, name: str) -> dict[str, float]:
    steps = {"gpt": 10, "resnet50": 30}[name]
    return throughput.race(session, lambda device: throughput.full_size(name, device), steps, rounds=5)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["resnet50", "gpt"])
def test_our_loop_is_as_fast_as_the_bare_one(name: str, note: Any) -> None:
    """The goal is 0.99 of the bare loop. For the GPT it is also an MFU of 45 %."""
    (found, *_) = run_ranks(world(), race, name, job=DistConfig(), limit_s=900)
    for figure, value in found.items():
        note(figure, value)
    assert found["ours_of_bare"] >= 0.99
    assert found.get("mfu", 1.0) >= 0.45


def timm_race(session: Session) -> dict[str, float]:
    import timm  # type: ignore[import-not-found, unused-ignore]

    def work(device: torch.device) -> throughput.Work:
        of_resnet = throughput.full_size("resnet50", device)
        model = partial(timm.create_model, "vit_base_patch16_224")
        return throughput.images(model, 224, of_resnet.samples // 2, "bf16")

    return throughput.race(session, work, steps=20, rounds=5)


@pytest.mark.alone
def test_our_loop_is_as_fast_as_the_bare_one_for_a_model_of_timm(note: Any) -> None:
    """Both loops train timm's model, because its own training script is not in the package."""
    pytest.importorskip("timm", reason="timm is not installed")
    (found, *_) = run_ranks(world(), timm_race, job=DistConfig(), limit_s=900)
    for figure, value in found.items():
        note(figure, value)
    assert found["ours_of_bare"] >= 0.99
