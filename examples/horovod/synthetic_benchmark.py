"""How many samples a second, on data made up, as Horovod's synthetic benchmark.

paceline train --script examples/horovod/synthetic_benchmark.py --backend horovod --nproc 2
"""

import argparse
import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16, help="on each rank")
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
lr_scaler = 1 if args.use_adasum else hvd.size()
optimizer = optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

# The same made-up batch on every rank, so that any number of ranks computes the same.
data = torch.randn(args.batch_size, 64)
target = torch.arange(args.batch_size) % 10
losses = []


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


timeit.timeit(benchmark_step, number=args.num_warmup_batches)
rates = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
log(f"samples a second on each of {hvd.size()} ranks: {sum(rates) / len(rates):.0f}")
log(f"last loss {losses[-1]:.6f}")
