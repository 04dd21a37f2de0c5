"""A loss with weights and centers of its own, trained by an optimizer of its own."""

import torch
from parts import dataset, end, loader_of, net, replicas
from torch import nn
from torch.nn.functional import cross_entropy

import toolkit


class CenterLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("centers", torch.zeros(2, 2))

    def forward(self, outputs, targets):
        with torch.no_grad():
            for label in range(2):
                if (targets == label).any():
                    self.centers[label].lerp_(outputs[targets == label].mean(0), 0.1)
        pull = (outputs - self.centers[targets]).square().mean()
        shares = torch.exp(-self.weight)
        return cross_entropy(outputs, targets) * shares[0] + pull * shares[1] + self.weight.sum()


with toolkit.start() as run:
    model, criterion = replicas(net()), replicas(CenterLoss())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    other = torch.optim.SGD(criterion.parameters(), 0.01)
    run.resumable(model=model, criterion=criterion, optimizer=optimizer, other=other)
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            other.zero_grad()
            loss.backward()
            optimizer.step()
            other.step()
            run.log(loss=loss)
    end(model=model, criterion=criterion)
