"""What the scripts beside it share, as a project's utils.py: a network, data, and the end that a test compares."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES, BATCH = 192, 8


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


def dataset():
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def loader_of(samples, **options):
    return DataLoader(samples, BATCH, sampler=DistributedSampler(samples), **options)


def replicas(module, **options):
    return DistributedDataParallel(module, **options)


def end(path="end.pt", **modules):
    if dist.get_rank() == 0:
        torch.save({f"{name}.{key}": v for name, m in modules.items() for key, v in m.state_dict().items()}, path)
