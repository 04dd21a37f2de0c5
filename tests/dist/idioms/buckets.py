"""A loop with DistributedDataParallel in the way that its argument names; see ../test_ddp_buckets.py."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import toolkit

WAY = sys.argv[1]
OPTIONS: dict[str, dict[str, Any]] = {
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}


class Net(nn.Module):
    """Its layers are used in another order than they are made in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 5)
        self.first = nn.Linear(32, 3000)
        self.middle = nn.Linear(3000, 64)
        self.spare = nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(self.first(inputs).relu()).relu()
        return self.last(hidden if WAY in ("unused", "static") else self.spare(hidden).relu())


def wrapped(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=1.5 if WAY == "compiled" else 0.02, **OPTIONS.get(WAY, {}))


with toolkit.start() as run:
    torch.manual_seed(3)
    net, other = Net(), Net()
    model: Any = net if WAY == "wrapped_late" else wrapped(net)
    second: Any = other if WAY == "wrapped_late" else wrapped(other)
    if WAY == "hook":
        model.register_comm_hook(None, bf16_compress_hook)
    if WAY == "built_in":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    optimizer = torch.optim.AdamW([*net.parameters(), *other.parameters()], lr=1e-2)
    if WAY == "bare":
        run.resumable(net=net, other=other, optimizer=optimizer)
    else:
        run.resumable(model=model, second=second, optimizer=optimizer)
    if WAY == "wrapped_late":
        model, second = wrapped(net), wrapped(other)
    if WAY == "compiled":
        model = torch.compile(model, backend="aot_eager")
    data = torch.randn(480, 32, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(5, (480,), generator=torch.Generator().manual_seed(2))
    dataset = torch.utils.data.TensorDataset(data, targets)
    for batch in run.steps(run.loader(dataset, global_batch_size=24), total=16):
        optimizer.zero_grad()
        if WAY == "no_sync":
            with model.no_sync():
                nn.functional.cross_entropy(model(batch.inputs + 0.1), batch.targets).backward()
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        if WAY != "later" or run.step >= 7:  # the second model is used from then on
            loss = loss + nn.functional.cross_entropy(second(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    if run.rank == 0:
        torch.save({**net.state_dict(), **{f"other.{k}": v for k, v in other.state_dict().items()}}, "end.pt")
