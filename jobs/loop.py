"""Train an image classifier in a loop of your own.

This is an ordinary PyTorch script, and six lines of the toolkit. Two ranks on any machine, in a few seconds; and by
itself, on one::

    toolkit submit configs/digits_loop.yaml --wait
    toolkit run configs/digits_loop.yaml
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import toolkit


def main() -> None:
    with toolkit.start() as run:  # process group, device, seeds, signals
        data = toolkit.build_datasets(run.config.data)
        layers = nn.Flatten(), nn.LazyLinear(256), nn.ReLU(), nn.Linear(256, data.classes)
        model = nn.Sequential(*layers).to(run.device)
        model(torch.zeros(1, *data.sample_shape, device=run.device))  # tells the lazy layer its size
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), run.config.optim.lr)
        loader = run.loader(data.train, global_batch_size=run.config.data.global_batch_size)
        run.resumable(model=wrapped, optimizer=optimizer)  # filled from the newest good checkpoint, if any
        for _ in run.epochs(run.config.train.epochs):
            for batch in run.steps(loader):  # between two steps it saves, stops and reports
                loss = cross_entropy(wrapped(batch.inputs), batch.targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)


if __name__ == "__main__":
    main()
