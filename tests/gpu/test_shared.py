"""Strategies on ranks that share one GPU, over gloo: what tests/dist holds them to.

gloo sums and broadcasts tensors of GPUs, and cannot carry what tensor and pipeline send: see build_strategy().
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist import test_compression, test_steps, test_strategy_contract
from tests.dist.ranks import DEVICE_VARIABLE, run_ranks
from tests.dist.strategy_cases import EXACT, NAMES, SUBJECTS
from tests.gpu import NO_GPU
from toolkit.ranks.session import Session

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]

contract, steps = test_strategy_contract, test_steps
NEED_NCCL = ("tensor", "pipeline")
SHARED: list[tuple[Callable[..., None], Any]] = [
    *(
        (contract.test_steps_equal_those_of_one_process_on_the_same_global_batches, (name, SUBJECTS[name][1]))
        for name in EXACT
        if not name.startswith(NEED_NCCL)
    ),
    *(
        (contract.test_training_continued_in_fresh_processes_has_the_bits_of_an_uninterrupted_one, (name,))
        for name in NAMES
        if not name.startswith(NEED_NCCL)
    ),
    *(
        (contract.test_evaluation_is_that_of_one_process_over_the_same_weights, (name,))
        for name in ("ddp", "fsdp", "local_sgd", "parameter_server")
    ),
    (contract.test_priming_changes_no_weights_buffers_gradients_optimizer_or_random_numbers, ()),
    (steps.test_clipping_is_torchs_on_one_process_however_gradients_lie_and_shares_differ, ("fsdp", 4)),
    (steps.test_a_bad_batch_of_one_rank_changes_no_weights_moments_counters_or_average, ("ddp",)),
    (steps.test_evaluations_use_torchs_average_without_a_trace_in_the_training, ("fsdp",)),
    (steps.test_pruning_takes_what_torchs_own_takes_and_no_momentum_brings_it_back, ("fsdp",)),
    (test_compression.test_top_k_of_all_values_takes_the_steps_of_one_process, ()),
]


def device_type(session: Session) -> str:
    return session.device.type


def test_the_ranks_are_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda:0")
    assert run_ranks(2, device_type) == ["cuda"] * 2


@pytest.mark.parametrize(("test", "args"), [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in SHARED])
def test_on_a_shared_gpu(test: Callable[..., None], args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda:0")
    test(*args)
