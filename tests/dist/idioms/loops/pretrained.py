"""Weights of another training are loaded at the start, some layers anew, with two learning rates."""

from pathlib import Path

import torch
from parts import dataset, end, loader_of, net, replicas
from torch import nn
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    with run.main_first():
        if not Path("pretrained.pth").exists():
            torch.manual_seed(11)
            torch.save({"state_dict": net().state_dict()}, "pretrained.pth")
    model = net()
    weights = torch.load("pretrained.pth", map_location="cpu")["state_dict"]
    print(model.load_state_dict({k: v for k, v in weights.items() if not k.startswith("4.")}, strict=False))
    nn.init.zeros_(model[4].weight)
    model = replicas(model)
    groups = [{"params": model.module[:4].parameters(), "lr": 0.001}, {"params": model.module[4].parameters()}]
    optimizer = torch.optim.AdamW(groups, 0.01)
    run.resumable(model=model, optimizer=optimizer)
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    end(model=model)
