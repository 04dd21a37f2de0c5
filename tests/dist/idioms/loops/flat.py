"""A flat script: no ``with`` block, a function that asks for its run, and an end by sys.exit() without the group."""

import sys

import torch
import torch.distributed as dist
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

run = toolkit.start()
model = replicas(net())
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
run.resumable(model=model, optimizer=optimizer, scheduler=scheduler)


def train(loader):
    for inputs, targets in toolkit.current().steps(loader):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        toolkit.current().log(loss=loss)


def main():
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        train(loader)
        scheduler.step()
    end(model=model)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
