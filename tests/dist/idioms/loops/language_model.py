"""Batches drawn at random from a file mapped into memory, and a rate that is a function of the step."""

import math

import numpy as np
import torch
from parts import end, replicas
from torch import nn
from torch.nn.functional import cross_entropy

import toolkit

WIDTH, CONTEXT = 16, 8


def get_batch():
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - CONTEXT, (4,))
    x, y = (np.stack([data[i + more : i + more + CONTEXT].astype(np.int64) for i in starts]) for more in (0, 1))
    return torch.from_numpy(x), torch.from_numpy(y)


def rate(step):
    return 0.01 * (step + 1) / 5 if step < 5 else 0.001 + 0.0045 * (1 + math.cos(math.pi * step / 40))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).cumsum(1))


with toolkit.start() as run:
    with run.main_first():
        if run.rank == 0:
            np.random.default_rng(1).integers(50, size=1000).astype(np.uint16).tofile("train.bin")
    model = replicas(Model())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    run.resumable(model=model, optimizer=optimizer)
    for step in run.steps(range(40), total=40):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        x, y = get_batch()
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.log(loss=loss)
    end(model=model)
