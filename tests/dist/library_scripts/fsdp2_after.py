"""A loop with fully_shard, as PyTorch's tutorial on FSDP2 shows it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import toolkit


def main(run):
    torch.manual_seed(7)
    inputs = torch.randn(384, 8, generator=torch.Generator().manual_seed(5))
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    run.resumable(model=model, optimizer=optimizer)
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.log(loss=loss)

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, "end.pt")


if __name__ == "__main__":
    with toolkit.start() as run:
        main(run)
