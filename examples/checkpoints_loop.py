"""A loop of your own that saves, is interrupted, and continues at another layout.

python checkpoints_loop.py
"""

import tempfile

import torch

import paceline
from paceline.models import GPT, token_cross_entropy
from paceline.testing import RankPool


def train(layout: str, folder: str, until: int) -> tuple[int, list[float]]:
    """Steps up to ``until`` on this rank, from where the newest checkpoint ends."""
    torch.manual_seed(0)
    model = GPT(vocab_size=64, context=16, layers=2, heads=4, width=32)
    engine = paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        layout=layout,
    )
    tokens = torch.randint(0, 64, (96, 17), generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = paceline.loader(dataset, global_batch=16, layout=engine.layout)
    losses = []
    with paceline.Checkpoints(folder, engine, loader=loader) as checkpoints:
        restored = checkpoints.restore()
        for batch in loader:
            losses.append(engine.step(batch).loss)
            checkpoints.save()  # written in the background
            if engine.steps_done == until:
                break
    return restored.step if restored else 0, losses


with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
    for layout, until in (("dp=2,zero=3", 2), ("tp=2", 4), ("dp=1", 6)):
        size = paceline.Layout.parse(layout).world_size
        step, losses = pool.run(train, layout, folder, until, world_size=size)[0]
        numbers = " ".join(f"{loss:.5f}" for loss in losses)
        print(f"{layout:12} went on after step {step}: losses {numbers}")
