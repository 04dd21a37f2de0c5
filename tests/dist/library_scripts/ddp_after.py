"""A loop with DistributedDataParallel, as PyTorch's tutorial on it shows it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import toolkit


def main(run):
    torch.manual_seed(7)
    inputs = torch.randn(384, 8, generator=torch.Generator().manual_seed(5))
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    run.resumable(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        scheduler.step()

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "end.pt")


if __name__ == "__main__":
    with toolkit.start() as run:
        main(run)
