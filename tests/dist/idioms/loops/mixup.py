"""mixup by a generator of numpy's that the loop draws from, and another one of `random`: both handed over."""

import random

import numpy as np
import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    numbers, chance = np.random.default_rng(run.rank), random.Random(1)
    model = replicas(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer, numbers=numbers, chance=chance)
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            share = float(numbers.beta(0.4, 0.4)) if chance.random() < 0.7 else 1.0
            other = torch.from_numpy(numbers.permutation(len(inputs)))
            outputs = model(share * inputs + (1 - share) * inputs[other])
            loss = share * cross_entropy(outputs, targets) + (1 - share) * cross_entropy(outputs, targets[other])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss, share=share)
    end(model=model)
