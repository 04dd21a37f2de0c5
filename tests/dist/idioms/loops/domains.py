"""Two domains one after the other in each epoch, then the first one again, as in adaptation and with critic steps."""

import torch
from parts import BATCH, dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    model = replicas(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer)
    source, target = loader_of(dataset()), run.loader(dataset(), global_batch_size=8 * BATCH)
    seen = []

    def train(batches, scale):
        for inputs, targets in batches:
            optimizer.zero_grad()
            (scale * cross_entropy(model(inputs), targets)).backward()
            optimizer.step()
            seen.append(run.batch_index)

    for _ in run.epochs(4):
        train(run.steps(source), 1.0)
        train(((batch.inputs, batch.targets) for batch in run.steps(target)), 0.5)
        model.eval()  # what stands between two loops of an epoch is done again
        model.train()
        train(run.steps(source), 0.1)
    assert seen[-1] == 2 * len(source) + 3 - 1, seen
    end(model=model)
