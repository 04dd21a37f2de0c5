"""An evaluation after each epoch that draws random numbers, keeps the best weights, and ends the training early."""

from copy import deepcopy

import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit


@torch.no_grad()
def evaluate(run, model):
    model.eval()
    inputs, targets = dataset().tensors
    loss = cross_entropy(model.module(inputs + 0.1 * torch.randn_like(inputs)), targets)
    model.train()
    return sum(value.item() for value in run.gather(loss)) / run.world_size


with toolkit.start() as run:
    model = replicas(net())
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    best = deepcopy(model.module)
    seen = {"best": float("inf"), "bad": 0, "history": []}
    run.resumable(model=model, best=best, optimizer=optimizer, scheduler=scheduler, seen=seen)
    loader = loader_of(dataset())
    for _ in run.epochs(12):
        for inputs, targets in run.steps(loader):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        figure = evaluate(run, model)
        run.log(**{"eval/loss": figure})
        scheduler.step(figure)
        seen["history"].append(figure)
        seen["bad"] = 0 if figure < seen["best"] else seen["bad"] + 1
        if not seen["bad"]:
            seen["best"] = figure
            best.load_state_dict(model.module.state_dict())
        if seen["bad"] == 2 or len(seen["history"]) == 6:
            break
    end(model=model, best=best)
