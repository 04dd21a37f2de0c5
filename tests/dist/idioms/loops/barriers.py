"""Barriers and collectives of its own in odd places: before the loop, in some steps, after each epoch."""

import torch
import torch.distributed as dist
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit

with toolkit.start() as run:
    names = [f"run of {dist.get_world_size()}" if run.rank == 0 else None]
    dist.broadcast_object_list(names)
    model = replicas(net())
    dist.barrier()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer)
    dist.barrier()
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        total = torch.zeros(2)
        for number, (inputs, targets) in enumerate(run.steps(loader)):
            if number % 3 == 0:
                dist.barrier()
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(inputs), len(inputs)])
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            run.log(loss=mean / dist.get_world_size())
        dist.all_reduce(total)
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, {"rank": run.rank, "loss": float(total[0])})
        if run.rank == 0:
            print(names, everything)
        dist.barrier()
    dist.barrier()
    end(model=model)
