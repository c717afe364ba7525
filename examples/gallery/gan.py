"""A GAN: two engines that train against each other, saved and resumed together.

python gan.py
python gan.py --steps 1500 --resume              # goes on where it ended
paceline train --script gan.py --nproc 2        # the same run on two ranks

The data are points on a ring, so that what was learned fits into one line of text.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

NOISE = 8


class Ring(Dataset):
    """Points near a circle of radius 2, each with the noise that the generator starts from.

    The noise belongs to the sample: drawn from a seeded generator, it is the same on every number
    of ranks. Drawn in the training loop, it would differ with the rank.
    """

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        angle = 2 * math.pi * torch.rand(count, generator=generator)
        points = torch.stack([angle.cos(), angle.sin()], dim=1)
        self.points = 2 * points + 0.1 * torch.randn(count, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(NOISE), self.points[index]  # new noise in each epoch


def make_net(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2),
        nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layout", default="auto", help="for both: dp=2 or dp=2,zero=3")
    parser.add_argument("--run-dir", default="runs/gan")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()
    steps = options.steps // 250 if options.tiny else options.steps

    world = paceline.World.init()
    torch.manual_seed(0)
    generator, discriminator = make_net(NOISE, 2), make_net(2, 1)

    # Each engine has a loss that calls the other's model, through the engine: with zero=3 that is
    # what gathers its parameters. What such a call leaves on the other model is dropped.
    def discriminator_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        noise, real = batch
        with torch.no_grad():
            fake = generators.model(noise)
        on_real, on_fake = model(real), model(fake)
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        return {"loss": loss, "on_real": on_real.sigmoid().mean()}

    def generator_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        noise, _ = batch
        return F.softplus(-discriminators.model(model(noise))).mean()

    def adam(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9))

    generators = paceline.Engine(
        generator, forward=generator_loss, optimizer=adam(generator), layout=options.layout
    )
    discriminators = paceline.Engine(
        discriminator,
        forward=discriminator_loss,
        optimizer=adam(discriminator),
        layout=options.layout,
    )
    data = paceline.loader(Ring(4096, seed=1), global_batch=128, layout=generators.layout)
    # One checkpoint has both: the second engine goes along as an object.
    with paceline.Checkpoints(
        f"{options.run_dir}/checkpoints",
        generators,
        loader=data,
        objects={"discriminator": discriminators},
    ) as checkpoints:
        if options.resume and checkpoints.restore() and world.is_main:
            print(f"resuming after step {generators.steps_done}")
        while generators.steps_done < steps:
            for batch in data:
                told = discriminators.step(batch)
                result = generators.step(batch)
                if world.is_main and result.step % (2 if options.tiny else 200) == 0:
                    print(
                        f"step {result.step}: generator {result.loss:.3f}, "
                        f"discriminator {told.loss:.3f}, on real {told.logged['on_real']:.3f}"
                    )
                if result.step % 500 == 0:
                    checkpoints.save()
                if result.step >= steps:
                    break
        checkpoints.save()

    # Evaluation: how far from the centre are generated points, and are they all around it?
    noise = torch.randn(512, NOISE, generator=torch.Generator().manual_seed(5))
    fake = generators.predict((noise,))  # every rank gives the same batch, and gets its rows
    if world.is_main:
        quadrants = torch.bincount((fake[:, 0] > 0).long() + 2 * (fake[:, 1] > 0), minlength=4)
        radius = fake.norm(dim=1)
        print(
            f"radius {radius.mean():.2f} (data: 2.00), spread {radius.std():.2f} (data: 0.10), "
            f"points in the quadrants {quadrants.tolist()}"
        )
    world.close()


if __name__ == "__main__":
    main()
