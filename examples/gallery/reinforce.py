"""Reinforcement learning: REINFORCE with a learned baseline, in a loop around `Engine`.

python reinforce.py
python reinforce.py --resume --steps 80               # goes on where it ended
paceline train --script reinforce.py --nproc 2        # the same returns on two ranks

The environment is a pole on a cart that has to be kept upright for 100 steps.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline

LENGTH = 100


class ActorCritic(nn.Module):
    """One body, two heads: what to do, and how much reward is still to come."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(state)
        return self.actor(x), self.critic(x).squeeze(-1)


def push(state: Tensor, right: Tensor) -> Tensor:
    """The next states of carts that are pushed to the right (1) or to the left (0)."""
    _, speed, angle, spin = state.unbind(1)
    force = 20.0 * right - 10.0
    sin, cos = angle.sin(), angle.cos()
    pull = (force + 0.05 * spin.square() * sin) / 1.1
    turn = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
    drive = pull - 0.05 * turn * cos / 1.1
    change = torch.stack([speed, drive, spin, turn], dim=1)
    return state + 0.02 * change


def play(model: nn.Module, episodes: Tensor, greedy: bool = False) -> dict[str, Tensor]:
    """Play the episodes with these numbers side by side: a row of the result for each."""
    # An episode draws from a generator that its number seeds. So it goes the same way on whichever
    # rank it is played, and a run is the same on any number of ranks.
    draws = [torch.Generator().manual_seed(int(episode)) for episode in episodes]
    state = torch.stack([torch.rand(4, generator=g) * 0.1 - 0.05 for g in draws])
    luck = torch.stack([torch.rand(LENGTH, generator=g) for g in draws])
    alive = torch.ones(len(episodes), dtype=torch.bool)
    states, actions, rewards = [], [], []
    for step in range(LENGTH):
        chance = model(state)[0].softmax(dim=1)[:, 1]  # of a push to the right
        right = (chance > (0.5 if greedy else luck[:, step])).float()
        states.append(state)
        actions.append(right.long())
        rewards.append(alive.float())  # one for each step that the pole stands
        state = push(state, right)
        alive = alive & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
    return {
        "states": torch.stack(states, dim=1),  # (episodes, LENGTH, 4)
        "actions": torch.stack(actions, dim=1),
        "rewards": torch.stack(rewards, dim=1),
    }


def policy_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Parts of the loss, each as (sum, count): the mean is over all steps played on all ranks."""
    counted = batch["rewards"]  # 1 until the pole falls, then 0: also the mask
    returns = torch.zeros_like(counted)
    later = torch.zeros(len(counted))
    for step in reversed(range(LENGTH)):
        later = counted[:, step] * (1 + 0.98 * later)
        returns[:, step] = later
    returns = returns / 20  # about one, so that both parts have one scale
    logits, value = model(batch["states"])
    advantage = (returns - value).detach()
    log_p = -F.cross_entropy(logits.flatten(0, 1), batch["actions"].flatten(), reduction="none")
    policy = -(log_p.view_as(counted) * advantage * counted).sum()
    critic = ((value - returns).square() * counted).sum()
    steps = counted.sum()
    return {
        "loss": (policy + critic, steps),
        "critic": (critic, steps),
        "length": (counted.sum(), torch.tensor(len(counted))),  # per episode, not per step
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run-dir", default="runs/reinforce")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()
    steps, global_batch = (options.steps // 20, 8) if options.tiny else (options.steps, 32)

    world = paceline.World.init()
    torch.manual_seed(0)
    model = ActorCritic()
    engine = paceline.Engine(
        model,
        forward=policy_loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=4e-3),
        clip_norm=1.0,
    )
    # The "dataset" are the numbers of the episodes. The loader deals them out to the ranks, each
    # number once, and remembers in a checkpoint which ones have been played.
    episodes = paceline.loader(range(1_000_000), global_batch=global_batch, layout=engine.layout)
    folder = f"{options.run_dir}/checkpoints"
    with paceline.Checkpoints(folder, engine, loader=episodes) as checkpoints:
        if options.resume and checkpoints.restore() and world.is_main:
            print(f"resuming after step {engine.steps_done}")
        for numbers in episodes:
            if engine.steps_done >= steps:
                break
            with torch.no_grad():
                played = play(engine.model, numbers)
            result = engine.step(played)
            if world.is_main and result.step % (1 if options.tiny else 10) == 0:
                length = result.logged["length"]
                print(f"step {result.step}: the pole stood for {length:.1f} of {LENGTH} steps")
        checkpoints.save()

    # Evaluation: new episodes, always the likelier action.
    with engine.evaluating(), torch.no_grad():
        played = play(engine.model, torch.arange(2_000_000, 2_000_050), greedy=True)
    if world.is_main:
        print(f"greedy, 50 new episodes: {played['rewards'].sum(dim=1).mean():.1f} steps")
    world.close()


if __name__ == "__main__":
    main()
