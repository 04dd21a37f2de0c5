"""A stream without a length, shared out among ranks and workers, with a shuffle buffer."""

import random

import torch
import torch.distributed as dist
from parts import dataset, end, net, replicas
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import toolkit


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        kept = []
        for index in range(self.rank * parts + part, len(self.samples), self.ranks * parts):
            kept.append(self.samples[index])
            if len(kept) > 8:
                yield kept.pop(random.randrange(len(kept)))
        random.shuffle(kept)
        yield from kept


with toolkit.start() as run:
    model = replicas(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer)
    loader = DataLoader(Stream(dataset()), 8, num_workers=2)
    for inputs, targets in run.steps(loader, total=36):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    end(model=model)
