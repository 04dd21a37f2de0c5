"""A loop with two networks and two optimizers, as PyTorch's example of a GAN shows it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import toolkit


def main(run):
    torch.manual_seed(7)
    real = torch.randn(384, 8, generator=torch.Generator().manual_seed(5)).cumsum(1)
    dataset = TensorDataset(real)
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8)))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))

    named = {"generator_optimizer": generator_optimizer, "judge_optimizer": judge_optimizer}
    run.resumable(generator=generator, judge=judge, **named)
    for _ in run.epochs(6):
        for (real,) in run.steps(loader):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            made = generator(torch.randn(len(real), 4))
            judge_optimizer.zero_grad()
            both = judge(torch.cat([real, made.detach()]))
            judge_loss = binary_cross_entropy_with_logits(both, torch.cat([ones, zeros]))
            judge_loss.backward()
            judge_optimizer.step()
            generator_optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(judge(made), ones)
            loss.backward()
            generator_optimizer.step()
            run.log(loss=loss, judge=judge_loss)

    if dist.get_rank() == 0:
        torch.save({**generator.module.state_dict(), **judge.module.state_dict(prefix="judge.")}, "end.pt")


if __name__ == "__main__":
    with toolkit.start() as run:
        main(run)
