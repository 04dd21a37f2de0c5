"""A loader that is made anew for each epoch, with a weighted sampler by a generator of its own."""

import torch
from parts import BATCH, dataset, end, net, replicas
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, WeightedRandomSampler

import toolkit


class Trainer:
    def __init__(self, run):
        self.run, self.model = run, replicas(net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.draw = torch.Generator().manual_seed(run.rank)
        run.resumable(model=self.model, optimizer=self.optimizer)

    def loader(self, epoch):
        weights = [1.0 + epoch * int(target) for _, target in dataset()]
        sampler = WeightedRandomSampler(weights, 48, generator=self.draw)
        return DataLoader(dataset(), BATCH, sampler=sampler)

    def train_one_epoch(self, epoch):
        for inputs, targets in self.run.steps(self.loader(epoch)):
            loss = cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.run.log(loss=loss)


with toolkit.start() as run:
    trainer = Trainer(run)
    for epoch in run.epochs(6):
        trainer.train_one_epoch(epoch)
    end(model=trainer.model)
