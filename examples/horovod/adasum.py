"""Adasum: the ranks' steps are combined by their directions, so that the rate needs no scaling.

paceline train --script examples/horovod/adasum.py --backend horovod --nproc 2
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--same-data", action="store_true", help="all ranks see what rank 0 sees")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=0.02)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum
)

source = torch.Generator().manual_seed(0 if args.same_data else hvd.rank())
for step in range(args.steps):
    data = torch.randn(32, 8, generator=source)
    optimizer.zero_grad()
    loss = F.mse_loss(model(data), data.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0 and step % 10 == 9:
        print(f"step {step + 1} loss {mean:.6f}", flush=True)
