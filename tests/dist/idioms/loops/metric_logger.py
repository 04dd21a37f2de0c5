"""A metric logger that asks its iterable for a length, as those of detection repositories do."""

from collections import defaultdict, deque

import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(lambda: deque(maxlen=20))

    def update(self, **values):
        for name, value in values.items():
            self.meters[name].append(value.item() if isinstance(value, torch.Tensor) else value)

    def log_every(self, iterable, every, header):
        width = len(str(len(iterable)))
        for number, thing in enumerate(iterable):
            yield thing
            if number % every == 0 or number == len(iterable) - 1:
                means = {name: sum(values) / len(values) for name, values in self.meters.items()}
                print(f"{header} [{number:{width}d}/{len(iterable)}]", means)


def train_one_epoch(run, model, optimizer, loader, epoch, warmup=5):
    logger = MetricLogger()
    steps = run.steps(loader)
    length = len(steps)
    for inputs, targets in logger.log_every(steps, 4, f"epoch {epoch}"):
        number = run.batch_index  # the logger's own begins anew after a resume within the epoch
        if epoch == 0 and number < warmup:
            optimizer.param_groups[0]["lr"] = 0.1 * (number + 1) / warmup
        loss = cross_entropy(model(inputs), targets) / (1 + number / length)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(loss=loss, lr=optimizer.param_groups[0]["lr"])
        run.log(loss=loss)


with toolkit.start() as run:
    model = replicas(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer)
    loader = loader_of(dataset())
    for epoch in run.epochs(6):
        train_one_epoch(run, model, optimizer, loader, epoch)
    end(model=model)
