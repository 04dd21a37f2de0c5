"""A critic that steps with each batch, and a generator that adds up its gradients and steps with every fifth."""

import torch
from parts import dataset, end, loader_of, replicas
from torch import nn

import toolkit

with toolkit.start() as run:
    generator = replicas(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    critic = replicas(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    slow, quick = torch.optim.RMSprop(generator.parameters(), 1e-3), torch.optim.RMSprop(critic.parameters(), 1e-3)
    run.resumable(generator=generator, critic=critic, slow=slow, quick=quick)
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        for real, _ in run.steps(loader):
            made = generator(torch.randn(len(real), 4))
            quick.zero_grad()
            loss = critic(made.detach()).mean() - critic(real).mean()
            loss.backward()
            quick.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
            critic.requires_grad_(False)
            (-critic.module(made).mean() / 5).backward()
            critic.requires_grad_(True)
            if run.every(5):
                slow.step()
                slow.zero_grad()
            run.log(loss=loss)
    end(generator=generator, critic=critic)
