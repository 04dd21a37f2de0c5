"""A script as accelerate's documentation shows it."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from toolkit.plugins.integrations import AccelerateRun

set_seed(7)
accelerator = Accelerator(cpu=True)
inputs = torch.randn(384, 8, generator=torch.Generator().manual_seed(5))
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
loader = DataLoader(dataset, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
run = AccelerateRun(accelerator)

for _ in run.epochs(6):
    for inputs, targets in run.steps(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        run.log(loss=loss)
    scheduler.step()
accelerator.save_model(model, "end")
