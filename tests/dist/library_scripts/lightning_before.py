"""A script as Lightning's documentation shows it."""

import os

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  #: on a node, as many as the launcher starts


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = cross_entropy(self.net(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", cross_entropy(self.net(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


inputs = torch.randn(384, 8, generator=torch.Generator().manual_seed(5))
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
L.seed_everything(7)
train_loader = DataLoader(dataset, batch_size=8, shuffle=True)
val_loader = DataLoader(dataset, batch_size=64)
trainer = L.Trainer(max_epochs=6, accelerator="cpu", devices=RANKS, strategy="ddp", logger=False)
trainer.fit(Classifier(), train_loader, val_loader)
trainer.save_checkpoint("end.ckpt")
