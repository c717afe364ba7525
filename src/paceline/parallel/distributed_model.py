"""A model on its layout, as the engine drives it: what to call, what to exchange, who counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.layout import Coordinate, Layout
from paceline.parallel.averaging import Averaging, average_gradients, exchange
from paceline.parallel.dtensor import cuts, is_first_copy
from paceline.parallel.loss_term import Term
from paceline.parallel.pipeline import Pipeline
from paceline.parallel.replicate import replicate
from paceline.parallel.shard import Sharded
from paceline.parallel.tensor import SplitForms, TensorPlan, plain
from paceline.world import Group, World

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class DistributedModel:
    """Made by ``paceline.parallel.apply_layout``.

    ``module`` is what to call with a microbatch, unless ``pipeline`` runs all of them. ``held``
    are the parameters of this rank by their names in the whole model: more than one where a tied
    weight lives on two of its pipeline stages.
    """

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        layout: Layout,
        world: World,
        *,
        pipeline: Pipeline | None = None,
        sharded: Sequence[Sharded] = (),
        context: Context = contextlib.nullcontext,
        devices: Sequence[torch.device] = (),
        tensor_plan: TensorPlan | None = None,
        split_forms: SplitForms | None = None,
        averaging: Averaging | None = None,
        bucket_mib: float | None = None,
    ) -> None:
        self.module, self.model = module, model
        self.layout, self.world = layout, world
        self.pipeline = pipeline
        self._sharded = sharded
        self.context = context
        self.devices = devices
        self.tensor_plan = tensor_plan  # print it, or pipeline.plan, to see what was decided
        self._forms = split_forms
        self._told_whole: set[str] = set()
        self._notes = [] if tensor_plan is None else [tensor_plan.summary()]
        self._averaging, self._bucket_mib = averaging, bucket_mib
        self.coordinate = layout.coordinate(world.rank)
        self.data_group = data_group(world, layout)
        self.held = self._held()
        self._duplicates = set() if pipeline is None else {id(p) for p in pipeline.duplicates()}

    def take_notes(self) -> list[str]:
        """What there is to tell the user since this was last asked: what stays whole, and why."""
        notes, self._notes = self._notes, []
        whole = {} if self._forms is None else self._forms.whole
        new = {name: why for name, why in whole.items() if name not in self._told_whole}
        self._told_whole.update(new)
        if new:
            listed = "; ".join(f"{name} ({why})" for name, why in new.items())
            notes.append(
                f"tensor parallel: computed whole on every rank, for want of a split form: {listed}"
            )
        return notes

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds the whole model, and DDP (or nothing) averages gradients."""
        layout = self.layout
        return layout.zero == 0 and layout.tp == 1 and layout.pp == 1

    @property
    def lockstep(self) -> bool:
        """Whether all data-parallel ranks must run equally many forwards: they gather together."""
        return self.layout.zero > 0

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for those that share its samples: one of them must."""
        if self.pipeline is not None and not self.pipeline.holds_last:
            return False
        return self.coordinate.tp == 0

    def __call__(self, part: Any, items: int) -> Term:
        """The loss of one microbatch, in the layout's own context."""
        with self.context():
            result = self.module(part, items)
        return result if isinstance(result, Term) else result[1]().with_total(result[0])

    def reducing(self, last: bool, counts: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of one microbatch's forward and backward; ``last`` of its step or not.

        ``counts`` is false for one that only keeps other ranks company.
        """
        for sharded in self._sharded:
            sharded.communicate(last=last, counts=counts)
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def plain(self, term: Term) -> Term:
        """``term`` with ordinary tensors, where tensor parallelism left parts."""
        if self.layout.tp == 1:
            return term
        return Term(plain(term.total), term.count, plain(term.output))

    def rewire(self, averaging: Averaging | None, bucket_mib: float | None) -> None:
        """Have gradients go another way, or in other buckets, from the next step on."""
        self._averaging, self._bucket_mib = averaging, bucket_mib
        self.follow_freezing()

    def follow_freezing(self) -> None:
        """Train other parameters than before: DDP and FSDP know those they were shown."""
        for sharded in self._sharded:
            sharded.follow_freezing()
        if isinstance(self.module, DistributedDataParallel):
            inner = self.module.module
            self.module = inner  # takes its hooks off the parameters before new ones are put on
            self.module = replicate(
                inner,
                self.world.device,
                self._averaging,
                bucket_mib=self._bucket_mib,
            )
        if self._averaging is not None:
            self._averaging.rewired()

    def let_go(self) -> None:
        """Keep this rank's own part alone, after forwards without a backward."""
        for sharded in self._sharded:
            sharded.let_go()

    def reset(self) -> None:
        """Forget a step that failed half way."""
        for sharded in self._sharded:
            sharded.reset()

    def finish_gradients(self) -> None:
        """What remains to be exchanged after the last backward of a step."""
        parameters = [p for own in self.held.values() for p in own]
        for sharded in self._sharded:
            sharded.finish()
        if self.pipeline is not None:
            self.pipeline.sync_tied()
        if not self.is_plain and self.layout.zero == 0 and self.layout.dp > 1:
            group = self.data_group.process_group
            assert group is not None
            average_gradients(parameters, group, self._averaging, self._bucket_mib)
        elif self.layout.dp == 1 and self._averaging is not None and self._averaging.is_due:
            exchange(parameters, self._averaging, self._bucket_mib)

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds its part of ``parameter`` to the norm, being the first with it."""
        if self.is_duplicate(parameter):
            return False
        copy, shard = divmod(self.coordinate.dp, self.layout.shards)
        cut = cuts(parameter)
        first_of_tp = is_first_copy(parameter) if "tp" in cut else self.coordinate.tp == 0
        first_of_shards = "shards" in cut or shard == 0
        return copy == 0 and first_of_tp and first_of_shards

    @property
    def tied(self) -> set[str]:
        """The parameters of which several pipeline stages hold a copy."""
        if self.pipeline is None:
            return set()
        return {name for name, stages in self.pipeline.plan.holders.items() if len(stages) > 1}

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        """Whether it is a copy of a tied weight that an earlier pipeline stage holds too."""
        return id(parameter) in self._duplicates

    def _held(self) -> dict[str, list[nn.Parameter]]:
        if self.pipeline is not None:
            return self.pipeline.held()
        return {name: [parameter] for name, parameter in self.model.named_parameters()}


class LossFirst(nn.Module):
    """Calls ``module`` and gives the loss beside the ``Term``.

    FSDP2 watches the tensors that it finds in what a module returns. That must be the loss alone:
    nothing is differentiated from the model's output, so the term comes as a function.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, part: Any, items: int) -> tuple[Tensor, Callable[[], Term]]:
        """The total, as a tensor of its own, and a function that gives the term."""
        term: Term = self.module(part, items)
        return term.total.clone(), lambda: term


def data_group(world: World, layout: Layout) -> Group:
    """The ranks that see other samples than this one but hold the same piece of the model."""
    return _axis_group(world, layout, _same_piece)


def stage_group(world: World, layout: Layout) -> Group:
    """The ranks that see the same samples and hold other pipeline stages."""
    return _axis_group(world, layout, lambda place: (place.dp, place.cp, place.tp))


def sample_group(world: World, layout: Layout) -> Group:
    """The ranks that see the same samples, and hold other pieces of the model or do its work."""
    return _axis_group(world, layout, lambda place: (place.dp, place.cp))


def stage_holders(world: World, layout: Layout) -> Group:
    """The ranks that hold parts of the same modules: all of them, but for other pipeline stages."""
    if layout.pp == 1:
        return world.everyone
    return _axis_group(world, layout, lambda own: (own.pp,))


def data_ranks(world: World, layout: Layout) -> list[tuple[int, ...]]:
    """The ranks of every ``data_group``, in the order in which torch is to make them."""
    return list(_members(world, layout, _same_piece).values())


def _same_piece(own: Coordinate) -> tuple[int, ...]:
    return (own.pp, own.cp, own.tp)


def _members(
    world: World, layout: Layout, key: Callable[[Coordinate], tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    members: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rank in range(world.size):
        own = key(layout.coordinate(rank))
        members[own] = (*members.get(own, ()), rank)
    return members


def _axis_group(
    world: World, layout: Layout, key: Callable[[Coordinate], tuple[int, ...]]
) -> Group:
    # Every rank makes every group, in the same order: that is how torch forms groups.
    members = _members(world, layout, key)
    groups = {own: world.group(ranks) for own, ranks in members.items()}
    return groups[key(layout.coordinate(world.rank))]
