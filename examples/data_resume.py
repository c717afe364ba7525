"""Stop in mid-epoch and resume on another number of ranks: no sample is lost or repeated.

python examples/data_resume.py
"""

from __future__ import annotations

import torch

from paceline.data import Loader, loader

SAMPLES = 20


def ranks(size: int, global_batch: int) -> list[Loader]:
    """The loaders of all ranks of a world, side by side in this one process."""
    dataset = torch.arange(SAMPLES)
    return [
        loader(dataset, global_batch=global_batch, seed=7, rank=rank, size=size)
        for rank in range(size)
    ]


def main() -> None:
    seen: list[int] = []

    three = ranks(size=3, global_batch=6)
    for _, shares in zip(range(2), zip(*three, strict=True), strict=False):
        print("3 ranks:", [share.tolist() for share in shares])
        seen += [index for share in shares for index in share.tolist()]

    state = three[0].state_dict()
    print("stopped:", state)

    two = ranks(size=2, global_batch=4)
    for data in two:
        data.load_state_dict(state)
    for shares in zip(*two, strict=True):
        print("2 ranks:", [share.tolist() for share in shares])
        seen += [index for share in shares for index in share.tolist()]

    assert sorted(seen) == list(range(SAMPLES))
    print(f"all {SAMPLES} samples, each once")


if __name__ == "__main__":
    main()
