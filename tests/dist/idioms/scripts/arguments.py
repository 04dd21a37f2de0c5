"""argparse, a resume from what is in the output folder, and a checkpoint with the scheduler after each epoch."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from parts import dataset, end, net, save, seed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

dist.init_process_group("gloo")
seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
start, last = 0, args.output_dir / "last.pth"
if last.exists():
    state = torch.load(last, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    start = state["epoch"]
sampler = DistributedSampler(dataset())
loader = DataLoader(dataset(), 8, sampler=sampler)
for epoch in range(start, args.epochs):
    seed(2, epoch, dist.get_rank())
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    save(last, model=model.state_dict(), epoch=epoch + 1, **states)
end(args.output_dir / "end.pt", model.module)
