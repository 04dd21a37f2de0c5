"""A scheduler that steps with every batch, and numpy's schedule of the weight decay written into the groups."""

import numpy as np
import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    model = replicas(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = loader_of(dataset())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, epochs=6, steps_per_epoch=len(loader))
    decay = np.cos(np.linspace(0, np.pi / 2, 6 * len(loader)))
    run.resumable(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            for group in optimizer.param_groups:
                group["weight_decay"] = decay[run.step]
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            run.log(loss=loss, lr=scheduler.get_last_lr()[0])
    end(model=model)
