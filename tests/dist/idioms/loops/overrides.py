"""A config as hydra's: dataclasses, `key=value` in sys.argv, and a working folder of its own."""

import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit


@dataclass
class Optim:
    name: str = "SGD"
    lr: float = 0.1
    betas: list = field(default_factory=lambda: [0.9, 0.99])


@dataclass
class Config:
    optim: Optim = field(default_factory=Optim)
    epochs: int = 90


def composed(words):
    config = Config()
    for word in words:
        path, _, text = word.partition("=")
        *parents, name = path.split(".")
        owner = config
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, type(getattr(owner, name))(text))
    return config


config = composed(sys.argv[1:])
end_path = Path("end.pt").absolute()
Path("outputs/now").mkdir(parents=True, exist_ok=True)
os.chdir("outputs/now")
with toolkit.start() as run:
    print(asdict(config), run.dir)
    model = replicas(net())
    optimizer = getattr(torch.optim, config.optim.name)(model.parameters(), config.optim.lr, betas=config.optim.betas)
    run.resumable(model=model, optimizer=optimizer)
    loader = loader_of(dataset())
    for epoch in run.epochs(config.epochs):
        for inputs, targets in run.steps(loader):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        torch.save(model.state_dict(), f"epoch-{epoch}-{run.rank}.pt")
    end(end_path, model=model)
