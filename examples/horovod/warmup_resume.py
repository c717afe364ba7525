"""Warm-up, gradient accumulation, checkpoints by rank 0 and resuming, as Horovod's ImageNet script.

paceline train --script examples/horovod/warmup_resume.py --backend horovod --nproc 2
"""

import argparse
import math
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8, help="on each rank, in each pass")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--base-lr", type=float, default=0.01)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt")
args = parser.parse_args()


class Metric:
    """The mean of a number over batches and ranks."""

    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


def adjust_learning_rate(optimizer, epoch, batch, batches):
    """From the rate of one rank to that of all, over the first epochs; then a tenth of it."""
    if epoch < args.warmup_epochs:
        epoch += (batch + 1) / batches
        factor = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        factor = 1.0 if epoch < 3 else 0.1
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * factor


def save_checkpoint(model, optimizer, epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


def main():
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)

    resume_from_epoch = 0
    for epoch in range(args.epochs, 0, -1):
        if os.path.exists(args.checkpoint_format.format(epoch=epoch)):
            resume_from_epoch = epoch
            break
    resume_from_epoch = hvd.broadcast(
        torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
    ).item()

    source = torch.Generator().manual_seed(0)
    pictures = torch.randn(128, 3, 8, 8, generator=source)
    labels = pictures.mean((2, 3)).argmax(1)
    dataset = torch.utils.data.TensorDataset(pictures, labels)
    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    whole = args.batch_size * args.batches_per_allreduce
    loader = torch.utils.data.DataLoader(dataset, batch_size=whole, sampler=sampler)

    stem = nn.Conv2d(3, 8, 3, padding=1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)]
    model = nn.Sequential(stem, Block(8), Block(8), *head)
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=5e-5)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average,
    )
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(resume_from_epoch, args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        train_loss = Metric("train_loss")
        for batch, (data, target) in enumerate(loader):
            adjust_learning_rate(optimizer, epoch, batch, len(loader))
            optimizer.zero_grad()
            for start in range(0, len(data), args.batch_size):
                part = slice(start, start + args.batch_size)
                loss = F.cross_entropy(model(data[part]), target[part])
                train_loss.update(loss)
                loss.div_(math.ceil(len(data) / args.batch_size))
                loss.backward()
            optimizer.step()
        save_checkpoint(model, optimizer, epoch)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1} loss {train_loss.avg.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
