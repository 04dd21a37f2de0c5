"""torch.multiprocessing starts the ranks: the job's one task is their parent, and a config names the folder."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parts import dataset, end, net, save, seed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Config:
    folder: str = "."
    ranks: int = 2


def composed(words):
    pairs = dict(word.split("=", 1) for word in words)
    return Config(pairs["folder"], int(pairs.get("ranks", 2)))


def worker(rank, config):
    folder = Path(config.folder)
    met = f"file://{folder}/met-{mp.parent_process().pid}"
    dist.init_process_group("gloo", init_method=met, rank=rank, world_size=config.ranks)
    seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    first = 0
    if (folder / "last.pt").exists():
        state = torch.load(folder / "last.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    inputs, targets = dataset().tensors
    for step in range(first, 36):
        seed(2, step, rank)
        chosen = torch.randint(len(inputs), (8,))
        loss = cross_entropy(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 5 == 0:
            save(folder / "last.pt", model=model.state_dict(), optimizer=optimizer.state_dict(), step=step + 1)
    end(folder / "end.pt", model.module)


if __name__ == "__main__":
    settings = composed(sys.argv[1:])
    mp.start_processes(worker, (settings,), settings.ranks, start_method="fork")
