"""Checkpoints by number, of which the newest is found by listing the folder. The data set lists a folder and draws."""

import random
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from parts import dataset, end, net, save, seed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Files(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.iterdir())

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        inputs, target = torch.load(self.paths[index])
        return inputs * random.uniform(0.8, 1.2), target


folder = Path(sys.argv[1])
dist.init_process_group("gloo")
if dist.get_rank() == 0 and not (folder / "files").exists():
    (folder / "files").mkdir()
    for number, (inputs, target) in enumerate(dataset()):
        torch.save((inputs.clone(), int(target)), folder / "files" / f"{number:03d}.pt")
dist.barrier()
seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
found = [path for path in folder.iterdir() if re.fullmatch(r"epoch-\d+\.pt", path.name)]
first = 0
if found:
    newest = max(found, key=lambda path: int(path.stem.split("-")[1]))
    state = torch.load(newest)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = int(newest.stem.split("-")[1]) + 1
sampler = DistributedSampler(Files(folder / "files"))
for epoch in range(first, 6):
    seed(2, epoch, dist.get_rank())
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(sampler.dataset, 8, sampler=sampler, num_workers=2):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save(folder / f"epoch-{epoch}.pt", model=model.state_dict(), optimizer=optimizer.state_dict())
end(folder / "end.pt", model.module)
