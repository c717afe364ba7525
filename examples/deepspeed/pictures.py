"""Small pictures in ten classes, in the way of DeepSpeed's CIFAR example.

paceline train --script examples/deepspeed/pictures.py --nproc 2 -- --deepspeed
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import paceline.compat.deepspeed as deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stage", type=int, default=1, choices=[0, 1, 2, 3])
parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

ds_config = {
    "train_batch_size": 16,
    "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.8, 0.999]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 5}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": args.dtype == "bf16"},
    "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 12},
    "wall_clock_breakdown": False,
    "zero_optimization": {"stage": args.stage, "overlap_comm": True},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc1 = nn.Linear(6 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def pictures(samples):
    """Pictures of eight by eight points; each class has a pattern of its own."""
    source = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, 8, 8, generator=source)
    labels = torch.randint(0, 10, (samples,), generator=source)
    noise = torch.randn(samples, 3, 8, 8, generator=source)
    return torch.utils.data.TensorDataset(patterns[labels] + noise, labels)


deepspeed.init_distributed()
torch.manual_seed(0)
net = Net()
parameters = filter(lambda p: p.requires_grad, net.parameters())
engine, optimizer, trainloader, _ = deepspeed.initialize(
    args=None if args.deepspeed_config is None else args,
    model=net,
    model_parameters=parameters,
    training_data=pictures(160),
    config=ds_config if args.deepspeed_config is None else None,
)
criterion = nn.CrossEntropyLoss()
for epoch in range(args.epochs):
    for inputs, labels in trainloader:
        inputs, labels = inputs.to(engine.device), labels.to(engine.device)
        loss = criterion(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
    total = loss.detach().clone()
    if engine.world_size > 1:
        deepspeed.comm.all_reduce(total)
    if engine.global_rank == 0:
        print(f"epoch {epoch}: loss {total.item() / engine.world_size:.5f}")
