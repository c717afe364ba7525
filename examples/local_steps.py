"""Local steps (DiLoCo): how many bytes are sent, and the loss that is reached.

python examples/local_steps.py
"""

import torch
from torch import nn

import paceline

inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
truth = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(inputs, inputs @ truth)


def train(local_steps: paceline.LocalSteps) -> paceline.History:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    trainer = paceline.Trainer(
        model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        global_batch=64,
        local_steps=local_steps,
        progress=False,
    )
    return trainer.fit(dataset, dataset, epochs=15, nproc=2)


# DiLoCo's usual outer momentum (0.9) is for long runs: this one synchronises a dozen times.
outer = {"outer_lr": 0.7, "outer_momentum": 0.5}
settings = {
    "local SGD": paceline.LocalSteps(every=10, method="average"),
    "DiLoCo": paceline.LocalSteps(every=10, **outer),
    "streaming, int8": paceline.LocalSteps(
        every=10, fragments=2, overlap=2, exchange="int8", **outer
    ),
}
print(f"{'':<24} {'bytes a step':>12} {'loss':>8}")
for name, local_steps in settings.items():
    history = train(local_steps)
    steps = sum(event.steps for event in history.wire)
    sent = sum(event.bytes_sent[0] for event in history.wire)
    print(f"{name:<24} {sent // steps:>12,} {history.evals[-1].metrics['loss']:>8.4f}")
