"""A model as a list of layers, cut into stages, in the way of DeepSpeed's pipeline example.

paceline train --script examples/deepspeed/pipeline.py --nproc 2 -- --stages 2
"""

import argparse

import torch
from torch import nn

import paceline.compat.deepspeed as deepspeed
from paceline.compat.deepspeed.pipe import LayerSpec, PipelineModule

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, default=1)
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()

ds_config = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.005}},
}

deepspeed.init_distributed()
torch.manual_seed(0)
layers = [
    LayerSpec(nn.Linear, 12, 32),
    nn.Tanh(),
    LayerSpec(nn.Linear, 32, 32),
    nn.Tanh(),
    LayerSpec(nn.Linear, 32, 4),
]
net = PipelineModule(
    layers=layers,
    loss_fn=nn.CrossEntropyLoss(),
    num_stages=args.stages,
    partition_method="parameters",
)
source = torch.Generator().manual_seed(1)
inputs = torch.randn(128, 12, generator=source)
dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
engine, _, _, _ = deepspeed.initialize(model=net, config=ds_config, training_data=dataset)
for step in range(args.steps):
    loss = engine.train_batch()
    if engine.global_rank == 0:
        print(f"step {step}: loss {float(loss):.5f}")
