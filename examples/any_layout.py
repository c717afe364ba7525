"""The same training on four layouts: the losses agree, the memory does not.

python any_layout.py
"""

import torch

import paceline
from paceline.models import GPT, token_cross_entropy
from paceline.testing import RankPool


def train(layout: str) -> tuple[list[float], int]:
    """Three steps on this rank; the losses, and the bytes of state this rank holds."""
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(vocab_size=64, context=16, layers=4, heads=4, width=32)
    engine = paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        layout=layout,
        clip_norm=1.0,
    )
    tokens = torch.randint(0, 64, (48, 17), generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    # Shares for the engine's layout: tensor- and pipeline-parallel peers get the same samples.
    batches = paceline.loader(dataset, global_batch=16, layout=engine.layout)
    losses = [engine.step(batch).loss for batch in batches]
    memory = engine.memory()[engine.world.rank]
    return losses, memory.parameters + memory.optimizer


with RankPool() as pool:
    for layout in ("dp=1", "dp=2,zero=3", "tp=2", "pp=2"):
        size = paceline.Layout.parse(layout).world_size
        losses, held = pool.run(train, layout, world_size=size)[0]
        numbers = " ".join(f"{loss:.5f}" for loss in losses)
        print(f"{layout:12} losses {numbers}   state on rank 0: {held / 1024:.0f} KiB")
