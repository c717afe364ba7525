"""Saving and loading a loop of the user's own: as an engine's checkpoints, at any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.engine.learning_rate import load_schedule
from paceline.engine.optimizer_groups import Groups
from paceline.engine.prepared_optimizer import LoopState, OptimizerControl, PreparedSchedule
from paceline.engine.rank_state import RankStates
from paceline.engine.whole_model import WholeModel
from paceline.errors import CheckpointError
from paceline.layout import Layout
from paceline.options import Reduction
from paceline.parallel.distributed_model import DistributedModel
from paceline.sync.replica import Replica
from paceline.sync.synchronous import SynchronousSGD
from paceline.world import World


class PreparedState:
    """Models, optimizers, schedules and scaler of a loop, as far as a checkpoint looks at them.

    One model is saved under its own names, as an engine's; of several, each below its number.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        controls: Sequence[OptimizerControl],
        schedules: Sequence[PreparedSchedule],
        loop: LoopState,
        layout: Layout,
    ) -> None:
        self.world: World = loop.world
        self.layout = layout
        self._controls = controls
        joined = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.replica = Replica(joined, layout, loop.world)
        self.replica.take_spread(DistributedModel(joined, joined, layout, loop.world))
        self.replica.steps_done = max([control.steps for control in controls], default=0)
        self.optimizer = JointOptimizer([control.optimizer for control in controls])
        self.groups = Groups(self.optimizer, joined)
        self.scaler = loop.scaler
        self.learning_rate = _Schedules(schedules)
        self.sync = SynchronousSGD(self.replica, None, Reduction())
        self.average = None
        self.rank_state = RankStates(self, WholeModel(joined))
        loop.settle_scale()

    @property
    def steps_done(self) -> int:
        """Steps of the optimizer that has done most."""
        return self.replica.steps_done

    def settle(self) -> None:
        """Nothing is under way."""

    def loaded(self) -> None:
        """Have the optimizers count from where the checkpoint was."""
        for control in self._controls:
            control.went_on_from(self.steps_done)


class JointOptimizer(Optimizer):
    """Several optimizers as one, to save and to load."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]
        self.state: Any = {}
        self._look()

    def _look(self) -> None:
        self.state = {p: own for one in self._optimizers for p, own in one.state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each optimizer its own groups and its own state."""
        groups = list(state_dict["param_groups"])
        for one in self._optimizers:
            own = [groups.pop(0) for _ in one.param_groups]
            numbers = [number for group in own for number in group["params"]]
            new = {number: place for place, number in enumerate(numbers)}
            one.load_state_dict(
                {
                    "state": {new[n]: s for n, s in state_dict["state"].items() if n in new},
                    "param_groups": [
                        {**group, "params": [new[n] for n in group["params"]]} for group in own
                    ],
                }
            )
        self._look()


class _Schedules:
    """All schedules of a loop, as the one that an engine has."""

    def __init__(self, schedules: Sequence[PreparedSchedule]) -> None:
        self._schedules = schedules

    def state_dict(self) -> list[dict[str, Any]]:
        return [one.state_dict() for one in self._schedules]

    def load_state_dict(self, saved: Any) -> None:
        found = saved if isinstance(saved, list) else [] if saved is None else [saved]
        if len(found) != len(self._schedules):
            raise CheckpointError(
                f"the checkpoint has the state of {len(found)} schedules, and "
                f"{len(self._schedules)} were prepared. Prepare those of that run."
            )
        for one, state in zip(self._schedules, found, strict=True):
            load_schedule(one.schedule, state)
            one.went_on()
