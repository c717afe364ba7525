"""Gradient compression: how many bytes each format sends, and the loss it reaches.

python examples/compression.py
"""

import torch
from torch import nn

import paceline

inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
truth = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(inputs, inputs @ truth)


def train(compress: str) -> paceline.History:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    trainer = paceline.Trainer(
        model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        global_batch=64,
        compress=paceline.Compression(compress, warmup_steps=10),
        progress=False,
    )
    return trainer.fit(dataset, epochs=15, nproc=2)


print(f"{'format':<12} {'bytes a step':>12} {'loss':>8}")
for form in ("fp16", "topk:0.1", "powersgd:2"):
    history = train(form)
    compressed = [event for event in history.wire if event.what == "gradients"]  # not the warm-up
    steps = sum(event.steps for event in compressed)
    sent = sum(event.bytes_sent[0] for event in compressed)
    print(f"{form:<12} {sent // steps:>12,} {history.losses[-1]:>8.4f}")
