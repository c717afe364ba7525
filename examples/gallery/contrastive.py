"""Contrastive learning: two views of a thing find each other among all others of the global batch.

python contrastive.py
paceline train --script contrastive.py --nproc 2                        # the same run
paceline train --script contrastive.py --nproc 2 -- --precision fp64    # to the last digit

The negatives of a sample are all other samples of the batch, those on other ranks too.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline
from paceline import collectives


class Pairs(Dataset):
    """Two noisy views of hidden vectors; of your own data: two crops, an image and its text."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(count, 8, generator=generator)
        # The two views look at the hidden vector through different matrices, the same for all.
        mix = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
        noise = 1.5 * torch.randn(2, count, 32, generator=generator)
        self.left, self.right = torch.einsum("nh,vhf->vnf", hidden, mix) + noise

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.left[index], self.right[index]


class TwoTowers(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 16))
        self.right = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 16))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = F.normalize(self.left(left), dim=1), F.normalize(self.right(right), dim=1)
        return left, right, self.log_scale.exp()


class GatherRows(torch.autograd.Function):
    """The rows of all ranks, in rank order, with gradients.

    Paceline's collectives alone carry none: a sample would learn nothing from being a negative on
    another rank, and the run would depend on the number of ranks. The gradient of a rank's rows is
    the sum of those that the losses of all ranks have for them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        world = paceline.World.current()
        # The same rows to everyone; unlike all_gather it takes shares of different sizes.
        everyone = collectives.all_to_all([rows] * world.size)
        ctx.begin = sum(map(len, everyone[: world.rank]))
        ctx.end = ctx.begin + len(rows)
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return collectives.all_reduce(gradient.clone())[ctx.begin : ctx.end]


def contrastive_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The mean loss of this rank's rows against those of all ranks; the engine joins the ranks."""
    left, right, scale = model(*batch)
    all_left, all_right = GatherRows.apply(left), GatherRows.apply(right)
    # Where the partners of this rank's rows are among all.
    sizes = collectives.all_gather_object(len(left))
    begin = sum(sizes[: paceline.World.current().rank])
    target = begin + torch.arange(len(left), device=left.device)
    to_right, to_left = scale * left @ all_right.T, scale * right @ all_left.T
    loss = (F.cross_entropy(to_right, target) + F.cross_entropy(to_left, target)) / 2
    found = (to_right.argmax(dim=1) == target).to(left.dtype).mean()
    return {"loss": loss, "found": found}  # "found" is reported beside the loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--precision", default="fp32", help="fp64 to compare numbers of ranks")
    parser.add_argument("--layout", default="auto", help="dp=2 or dp=2,zero=3")
    parser.add_argument("--run-dir", default="runs/contrastive")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()
    steps, size = (options.steps // 50, 97) if options.tiny else (options.steps, 2000)

    torch.manual_seed(0)
    model = TwoTowers()
    trainer = paceline.Trainer(
        model,
        forward=contrastive_loss,  # the whole loss is ours: called as forward(model, batch)
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        global_batch=64,  # so many candidates: part of the task, not of the machine
        # No microbatch: it would cut the candidates, too.
        precision=options.precision,
        layout=options.layout,
        evaluation=paceline.Evaluation(every=2 if options.tiny else 50),
        run_dir=options.run_dir,
    )
    held_out = Pairs(100 if options.tiny else 500, seed=2)
    history = trainer.fit(Pairs(size, seed=1), held_out, steps=steps, resume=options.resume)
    print(f"last training loss: {history.losses[-1]:.9f}")

    # Embed the held-out pairs, and look for each one's partner among all of them. Every rank gets
    # all rows, in the order of the dataset.
    views = trainer.predict(
        held_out,
        forward=lambda model, batch: model(*batch),
        take=lambda output: {"left": output[0], "right": output[1]},
    )
    best = (views["left"] @ views["right"].T).argmax(dim=1)
    share = (best == torch.arange(len(held_out))).double().mean()
    print(f"partner found among {len(held_out)}: {share:.3f}")


if __name__ == "__main__":
    main()
