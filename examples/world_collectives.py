"""Join a world and use its collectives. Run it alone, or on two ranks:

python examples/world_collectives.py
torchrun --nproc-per-node 2 examples/world_collectives.py
"""

import torch

from paceline import World, collectives


def main() -> None:
    with World.init() as world:
        world.seed(0)  # each rank has its own random stream
        mine = torch.randn(3)

        mean = collectives.all_reduce(mine.clone(), "mean")
        everyone = collectives.all_gather(mine)
        hosts = collectives.all_gather_object(world.info()["host"])
        collectives.barrier()

        if world.is_main:
            print(f"{world.size} rank(s) on {sorted(set(hosts))}, device {world.device}")
            for rank, values in enumerate(everyone):
                print(f"  rank {rank}: {[round(v, 3) for v in values.tolist()]}")
            print(f"  mean:   {[round(v, 3) for v in mean.tolist()]}")


if __name__ == "__main__":
    main()
