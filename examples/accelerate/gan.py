"""A generator and a critic: two models, two optimizers and two backwards a batch.

paceline train --script examples/accelerate/gan.py --nproc 2
paceline train --script examples/accelerate/gan.py --nproc 2 -- --zero 2
torchrun --nproc-per-node 2 examples/accelerate/gan.py --library accelerate
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--library", choices=["paceline", "accelerate"], default="paceline")
parser.add_argument("--batch-size", type=int, default=16, help="over all ranks")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--zero", type=int, default=0, help="shard both models so far (paceline)")
args = parser.parse_args()


def make_accelerator():
    """The one place where the two libraries differ."""
    if args.library == "paceline":
        import paceline

        layout = f"zero={args.zero}" if args.zero else "auto"
        return paceline.Accelerator(layout=layout, batch_size_is="global")
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))


def main():
    torch.manual_seed(42)
    torch.set_num_threads(1)
    accelerator = make_accelerator()
    noise = torch.randn(128, 4)
    real = torch.randn(128, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.5]]) + 2
    loader = DataLoader(TensorDataset(noise, real), args.batch_size)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
    generator, critic, of_generator, of_critic, loader = accelerator.prepare(
        generator, critic, of_generator, of_critic, loader
    )
    for epoch in range(args.epochs):
        losses = []
        for z, x in loader:
            fake = generator(z)
            judged = critic(torch.cat([x, fake.detach()]))
            loss_critic = F.softplus(torch.cat([-judged[: len(x)], judged[len(x) :]])).mean()
            accelerator.backward(loss_critic)
            of_critic.step()
            of_critic.zero_grad()

            loss_generator = F.softplus(-critic(fake)).mean()
            accelerator.backward(loss_generator)
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()
            both = torch.stack([loss_critic.detach(), loss_generator.detach()])
            losses.append(accelerator.gather(both.reshape(1, 2)).mean(0))
        of_c, of_g = torch.stack(losses).mean(0).tolist()
        accelerator.print(f"epoch {epoch}: critic loss {of_c:.6f}, generator loss {of_g:.6f}")


if __name__ == "__main__":
    main()
