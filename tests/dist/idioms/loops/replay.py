"""Reinforcement: an environment with a state, a buffer of what was seen, and steps that are numbers."""

from collections import deque

import torch
import torch.distributed as dist
from parts import end, replicas
from torch import nn

import toolkit


class Environment:
    def __init__(self):
        self.place = torch.zeros(3)

    def step(self, action):
        self.place = 0.9 * self.place + 0.1 * torch.randn(3) + 0.05 * action
        return -self.place.square().sum()

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


with toolkit.start() as run:
    policy, value = replicas(nn.Linear(3, 3)), replicas(nn.Linear(3, 1))
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], 0.01)
    environment, memory = Environment(), {"seen": deque(maxlen=32), "best": -1e9}
    run.resumable(policy=policy, value=value, optimizer=optimizer, environment=environment, memory=memory)
    for _ in run.steps(range(40), total=40):
        for _ in range(4):
            before = environment.place.clone()
            with torch.no_grad():
                action = policy.module(before) + 0.1 * torch.randn(3)
            reward = environment.step(action)
            memory["seen"].append((before, action, float(reward)))
            memory["best"] = max(memory["best"], float(reward))
        chosen = [memory["seen"][int(torch.randint(len(memory["seen"]), ()))] for _ in range(8)]
        places, actions = (torch.stack([each[part] for each in chosen]) for part in (0, 1))
        rewards = torch.tensor([each[2] for each in chosen])
        advantage = rewards - value(places)[:, 0]
        loss = ((policy(places) - actions).square().sum(1) * advantage.detach()).mean() + advantage.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, best=memory["best"])
    assert dist.is_initialized()
    end(policy=policy, value=value)
