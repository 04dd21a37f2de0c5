"""argparse, as in every example, and a file that the arguments are dumped to."""

import argparse
import json
from pathlib import Path

import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--no-dropout", action="store_true")
    return parser.parse_args()


def main(run, args):
    model = net()
    if args.no_dropout:
        model[3].p = 0.0
    model = replicas(model)
    optimizer = torch.optim.Adadelta(model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, args.gamma)
    run.resumable(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = loader_of(dataset())
    for _ in run.epochs(args.epochs):
        for inputs, targets in run.steps(loader):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        scheduler.step()
    end(model=model)


if __name__ == "__main__":
    args = parsed()
    with toolkit.start() as run:
        Path(f"args-{run.rank}.json").write_text(json.dumps(vars(args)))
        main(run, args)
