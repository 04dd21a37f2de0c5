"""A process of its own by torch.multiprocessing, to which it sends weights and from which it takes figures."""

import queue

import torch
import torch.multiprocessing as mp
from parts import dataset, end, loader_of, net, replicas
from torch.nn.functional import cross_entropy

import toolkit


def judge(weights, figures):
    while mp.parent_process().is_alive():
        try:
            sent = weights.get(timeout=1)
        except queue.Empty:
            continue
        if sent is None:
            return
        figures.put(sum(float(abs(value).sum()) for value in sent.values()))


def main():
    context = mp.get_context("fork")
    weights, figures = context.Queue(), context.Queue()
    process = context.Process(target=judge, args=(weights, figures), daemon=True)
    process.start()
    with toolkit.start() as run:
        model = replicas(net())
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        norms = []
        run.resumable(model=model, optimizer=optimizer, norms=norms)
        loader = loader_of(dataset())
        for _ in run.epochs(6):
            for inputs, targets in run.steps(loader):
                loss = cross_entropy(model(inputs), targets) + 1e-4 * sum(norms[-3:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                weights.put({name: p.detach().clone().numpy() for name, p in model.named_parameters()}, timeout=60)
                norms.append(figures.get(timeout=60))
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 / (1 + norms[-1] / 100)
                run.log(loss=loss)
        end(model=model)
    weights.put(None)
    process.join(60)


if __name__ == "__main__":
    main()
