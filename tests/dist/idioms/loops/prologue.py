"""An order, a mask and a list of tasks that each epoch draws at its beginning, from torch, numpy and random."""

import random

import numpy as np
import torch
from parts import BATCH, dataset, end, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    torch.manual_seed(7)
    model = replicas(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer)
    inputs, targets = dataset().tensors
    for _ in run.epochs(6):
        order = torch.randperm(len(inputs))
        assert all(
            other == order.tolist() for other in run.gather(order.tolist())
        )  # seeded alike, all ranks draw alike
        mask = torch.from_numpy(np.random.rand(8) < 0.8)
        scales = random.sample([0.5, 1.0, 2.0], 3)
        for first in run.steps(range(0, len(order), 3 * BATCH)):
            part = order[first : first + 3 * BATCH][run.rank :: run.world_size]
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[part] * mask), targets[part])
            (scales[run.batch_index % 3] * loss).backward()
            optimizer.step()
    end(model=model)
