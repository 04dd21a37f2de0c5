"""Two optimizers, a teacher and numpy's schedule, in one checkpoint with the states of the generators."""

import random
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from parts import dataset, end, net, save, seed
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
seed(1)
body, head = DistributedDataParallel(net()), DistributedDataParallel(nn.Linear(2, 2))
teacher = deepcopy(body.module)
seed(2, dist.get_rank())
parts = {
    "body": body,
    "head": head,
    "teacher": teacher,
    "one": torch.optim.AdamW(body.parameters(), 0.01),
    "two": torch.optim.SGD(head.parameters(), 0.05, momentum=0.9),
}
rates = np.geomspace(0.02, 0.002, 36)
first = 0
if (folder / "all.pt").exists():
    state = torch.load(folder / "all.pt", weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    first = state["step"]
    mine = state["random"][dist.get_rank()]
    torch.set_rng_state(mine[0])
    np.random.set_state(mine[1])
    random.setstate(mine[2])
inputs, targets = dataset().tensors
for step in range(first, len(rates)):
    parts["one"].param_groups[0]["lr"] = rates[step]
    chosen = torch.randint(len(inputs), (8,))
    noisy = inputs[chosen] * random.uniform(0.9, 1.1) + float(np.random.normal(0, 0.1))
    with torch.no_grad():
        wanted = teacher(inputs[chosen])
    outputs = body(noisy)
    loss = cross_entropy(head(outputs), targets[chosen]) + 0.1 * mse_loss(outputs, wanted)
    for name in ("one", "two"):
        parts[name].zero_grad()
    loss.backward()
    parts["one"].step()
    if step % 2:
        parts["two"].step()
    with torch.no_grad():
        for ours, theirs in zip(body.module.parameters(), teacher.parameters(), strict=True):
            theirs.lerp_(ours, 0.05)
    if (step + 1) % 4 == 0:
        random_states = [None] * dist.get_world_size()
        dist.all_gather_object(random_states, (torch.get_rng_state(), np.random.get_state(), random.getstate()))
        states = {name: part.state_dict() for name, part in parts.items()}
        save(folder / "all.pt", step=step + 1, random=random_states, **states)
end(folder / "end.pt", body.module)
