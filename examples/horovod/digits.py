"""Small pictures of digits, in the way of Horovod's MNIST example: nothing of Paceline in it.

paceline train --script examples/horovod/digits.py --backend horovod --nproc 2
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32, help="on each rank")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02, help="scaled by the number of ranks")
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

DRAWN = [0x75557, 0x26227, 0x71747, 0x71317, 0x55711, 0x74717, 0x74757, 0x71122, 0x75757, 0x75717]


class Digits(torch.utils.data.Dataset):
    """Digits of three by five points, drawn with noise."""

    def __init__(self, samples, seed):
        source = torch.Generator().manual_seed(seed)
        shapes = torch.tensor(
            [[(rows >> (4 * y + x)) & 1 for y in range(5) for x in range(3)] for rows in DRAWN]
        ).float()
        self.labels = torch.randint(0, 10, (samples,), generator=source)
        noise = torch.randn(samples, 15, generator=source)
        self.pictures = (shapes[self.labels] + 0.3 * noise).view(samples, 1, 5, 3)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(120, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv(x)).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main():
    hvd.init()
    torch.manual_seed(42)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)

    options = {"num_workers": args.workers}
    if args.workers > 0:
        options["multiprocessing_context"] = "forkserver"
    train, test = Digits(512, seed=0), Digits(256, seed=1)
    sampler = torch.utils.data.distributed.DistributedSampler(
        train, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(train, args.batch_size, sampler=sampler, **options)
    test_sampler = torch.utils.data.distributed.DistributedSampler(
        test, num_replicas=hvd.size(), rank=hvd.rank()
    )
    test_loader = torch.utils.data.DataLoader(test, args.batch_size, sampler=test_sampler)

    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
        model.eval()
        total, right = 0.0, 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output, target = model(data.to(device)), target.to(device)
                total += F.nll_loss(output, target, reduction="sum").item()
                right += (output.argmax(1) == target).float().sum().item()
        total = metric_average(total / len(test_sampler), "avg_loss")
        right = metric_average(right / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch} loss {total:.6f} accuracy {right:.4f}", flush=True)


if __name__ == "__main__":
    main()
