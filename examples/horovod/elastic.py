"""Training that goes on when ranks are lost, as Horovod's elastic examples.

paceline train --script examples/horovod/elastic.py --backend horovod --nproc 2 --max-restarts 3
"""

import argparse
import os
import signal

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16, help="on each rank")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.02, help="scaled by the number of ranks")
parser.add_argument("--batches-per-commit", type=int, default=3)
parser.add_argument("--kill", default="", help="rank:epoch:batch: what is killed there, once")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

source = torch.Generator().manual_seed(0)
features = torch.randn(256, 8, generator=source)
dataset = torch.utils.data.TensorDataset(features, features.sum(1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def maybe_die(epoch, batch):
    if args.kill == f"{hvd.rank()}:{epoch}:{batch}" and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    if hvd.rank() == 0:
        print(f"from epoch {state.epoch} batch {state.batch}", flush=True)
    for state.epoch in range(state.epoch, args.epochs + 1):  # noqa: B020
        for data, target in loader:
            maybe_die(state.epoch, state.batch)
            state.optimizer.zero_grad()
            loss = F.mse_loss(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            sampler.record_batch(state.batch, args.batch_size)
            state.batch += 1
            if state.batch % args.batches_per_commit == 0:
                state.commit()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} loss {mean:.6f}", flush=True)
        state.batch = 0
        sampler.set_epoch(state.epoch + 1)


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=1, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
