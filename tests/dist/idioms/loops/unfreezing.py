"""A body that is frozen at first. Later its layers are unfrozen, and become a group of the optimizer."""

import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    layers = net()
    layers[0].requires_grad_(False)
    rest = [parameter for parameter in layers.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(rest, 0.05, momentum=0.9)
    run.resumable(model=layers, optimizer=optimizer)
    model = replicas(layers)
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            if run.step == 14:
                layers[0].requires_grad_(True)
                model = replicas(layers)
                optimizer.add_param_group({"params": layers[0].parameters(), "lr": 0.01})
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    end(model=layers)
