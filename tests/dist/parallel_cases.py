"""DDP, FSDP2 and a pipeline over the default process group, beside one process."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS, WIDTH = 2, 8, 16


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(module: nn.Module, inputs: Callable[[int], Tensor]) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(STEPS):
        module(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone() -> nn.Sequential:
    expected = model()
    train(expected, batch)
    return expected


def own_rows(step: int) -> Tensor:
    return batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def close(got: nn.Module, expected: nn.Module, atol: float = 1e-6) -> None:
    for (name, mine), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        value = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(value, other, atol=atol, rtol=0, msg=partial("{}: {}".format, name))


def ddp(_: object) -> None:
    replica = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    train(replica, own_rows)
    close(replica.module, alone())


def ddp_with_a_hook(_: object) -> None:
    """torch's own hook sends gradients in fp16, as a chain of futures."""
    replica = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(replica, own_rows)
    close(replica.module, alone(), atol=1e-3)


def fsdp(_: object) -> None:
    sharded = model()
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer)
    fully_shard(sharded)
    train(sharded, own_rows)
    close(sharded, alone())


def pipeline(_: object) -> None:
    """The first two ranks are a stage each. They alternate forward and backward passes of four micro-batches."""
    # All ranks must call new_group, so those without a stage leave only after it.
    pair: Any = dist.new_group([0, 1])
    rank = dist.get_rank()
    if rank > 1:
        return
    whole = model()
    part = deepcopy(whole[:2] if rank == 0 else whole[2:])
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=pair)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, _: out.square().mean())
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    for step in range(STEPS):
        if rank == 0:
            schedule.step(batch(step))
        else:
            schedule.step(target=torch.zeros(ROWS, WIDTH))
        optimizer.step()
        optimizer.zero_grad()
    expected = alone()
    close(part, expected[:2] if rank == 0 else expected[2:])


CASES = {"DDP": ddp, "DDP with a hook": ddp_with_a_hook, "FSDP2": fsdp, "pipeline 1F1B": pipeline}
