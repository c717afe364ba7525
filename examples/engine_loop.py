"""Your own loop on any number of ranks; run it alone or with `paceline train --script`.

python engine_loop.py
paceline train --script engine_loop.py --nproc 2
"""

import torch

import paceline
from paceline.data import stdlib_source
from paceline.models import GPT, token_cross_entropy

world = paceline.World.init()
train, _ = stdlib_source(context=32)

torch.manual_seed(0)  # the same weights on every rank
model = GPT(context=32, layers=2, heads=2, width=32)
engine = paceline.Engine(
    model,
    loss=token_cross_entropy,  # returns a sum and a count: the mean is over tokens
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    clip_norm=1.0,
    microbatch=8,  # larger shares are accumulated, without communication
)
with paceline.loader(train, global_batch=48, seed=0) as batches:
    for batch in batches:  # this rank's share of each global batch of 48
        result = engine.step(batch)
        if world.is_main and result.step % 10 == 0:
            print(f"step {result.step}: loss {result.loss:.4f}, norm {result.grad_norm:.3f}")
        if result.step == 40:
            break
world.close()
