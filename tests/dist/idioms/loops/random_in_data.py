"""A data set that draws from `random`, numpy's legacy functions, and generators of its own, in data workers."""

import random

import numpy as np
import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit


class Augmented(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples, self.own, self.numbers = samples, random.Random(3), np.random.default_rng(4)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, target = self.samples[index]
        scale = random.uniform(0.8, 1.2) * np.random.uniform(0.8, 1.2) * self.own.uniform(0.8, 1.2)
        return inputs * scale + torch.from_numpy(self.numbers.normal(0, 0.1, 8)).float(), target


with toolkit.start() as run:
    model = replicas(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer)
    loader = loader_of(Augmented(dataset()), num_workers=2)
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    end(model=model)
