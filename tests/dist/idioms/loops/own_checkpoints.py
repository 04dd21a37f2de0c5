"""Checkpoints of its own beside ours: written each epoch and for the best loss, and loaded at the start."""

from pathlib import Path

import torch
import torch.distributed as dist
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    module = net()
    if Path("last.pth").exists():
        module.load_state_dict(torch.load("last.pth", map_location="cpu")["model"])
    model = replicas(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    reached = {"best": float("inf"), "sum": 0.0}
    run.resumable(model=model, optimizer=optimizer, scheduler=scheduler, reached=reached)
    loader = loader_of(dataset())
    for epoch in run.epochs(6):
        for inputs, targets in run.steps(loader):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reached["sum"] += loss.item()
            run.log(loss=loss)
        scheduler.step()
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, "last.pth")
            if reached["sum"] < reached["best"]:
                torch.save(state, "best.pth")
        dist.barrier()
        reached["best"], reached["sum"] = min(reached["best"], reached["sum"]), 0.0
    end(model=model)
