"""Gradients of four batches, over an epoch's end, too, with a GradScaler that is off, autocast and clipping."""

from contextlib import nullcontext

import torch
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    model = replicas(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.resumable(model=model, optimizer=optimizer, scaler=scaler)
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        for inputs, targets in run.steps(loader):
            is_last = (run.step + 1) % 4 == 0
            with nullcontext() if is_last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = cross_entropy(model(inputs), targets) / 4
                scaler.scale(loss).backward()
            if is_last:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            run.log(loss=loss)
    end(model=model)
