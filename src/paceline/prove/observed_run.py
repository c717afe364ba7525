"""A few steps of a run on this rank, watched: what each computed, and how it was computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data import Loader
from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.errors import DataError
from paceline.prove.cases import Case
from paceline.prove.comparison import Values
from paceline.prove.no_dropout import NoDropout, random_state
from paceline.prove.samples import SampleCut, cutting
from paceline.prove.subject import Subject
from paceline.world import World

_SPREADING = ("sharding", "tensor", "pipeline", "checkpoint_activations", "device_map")
"""Options that say how a model is spread or recomputed: the reference does neither."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class ModelFacts:
    """What a run showed of the model that the words of a report need."""

    order: list[str] = field(default_factory=list)
    """Modules in the order in which they first ran."""
    ties: list[list[str]] = field(default_factory=list)
    """Names of parameters that are one tensor; on a layout, as the engine found the model."""
    live_norms: list[str] = field(default_factory=list)
    """Plain batch norms that normalise over the samples they see."""
    dropout: bool = False
    """Whether there was dropout, which was switched off."""
    layout_free: bool = False
    """Whether the forward pass drew random numbers that do not know the layout."""
    own_stream: list[str] = field(default_factory=list)
    """Modules that drew from the rank's own stream where others did not."""
    draws: bool = False
    """Whether the forward pass drew random numbers from the rank's own stream."""


class ObservedRun:
    """One engine on one case, stepped over the subject's data.

    ``alone``: on one process, where a plain batch norm sees everything; ``cut`` says how its
    batches are cut.
    """

    def __init__(
        self,
        subject: Subject,
        case: Case,
        *,
        world: World,
        alone: bool = False,
        cut: SampleCut | None = None,
    ) -> None:
        built = subject.build()
        self.facts = ModelFacts()
        options = case.options(built.options)
        self._quiet = NoDropout()
        self._is_fast = options.get("randomness") == "fast"
        if self._is_fast:
            self._quiet.silence(built.model)
        if alone:
            options = {name: value for name, value in options.items() if name not in _SPREADING}
            options["sync_batchnorm"] = False
            options["microbatch"] = None if cut is None else 1  # any: the cut is what counts
        self._cut = cut
        self._steps = subject.steps
        self._alone = alone
        self.loader = subject.loader(built, case.data_rank(world.rank), case.layout.dp)
        self.engine = Engine(
            built.model, optimizer=built.optimizer, loss=built.loss, world=world, **options
        )
        self.built = built
        internals_of(self.engine).context.observer = self._observe
        self._gradients: dict[str, Tensor] = {}
        self.samples: list[int] = []
        """By step: the samples of the global batch, by the engine's account."""
        self.facts.ties = tied(self.engine.model)

    def run(self) -> Iterator[tuple[int, Values]]:
        """The steps, from 1, each with everything it computed."""
        batches = endless(self.loader)
        # A spread model has hooks and wrappers of its own: one process tells the order.
        removers = self._note_order() if self._alone else []
        try:
            for step in range(1, self._steps + 1):
                batch = next(batches)
                before = random_state()
                quiet = self._quiet if self._is_fast else contextlib.nullcontext()
                with quiet, self._cutting():
                    result = self.engine.step(batch)
                self.engine.settle()
                self.samples.append(result.samples)
                self.facts.draws |= before != random_state()
                self.facts.dropout |= self._quiet.met
                self._note_draws()
                yield step, self._values(result.loss, result.grad_norm)
        finally:
            for remove in removers:
                remove()
            self.loader.close()
        self.facts.live_norms = [
            name
            for name, module in self.engine.model.named_modules()
            if isinstance(module, _BATCH_NORMS) and module.training
        ]

    def _note_draws(self) -> None:
        randomness = internals_of(self.engine).replica.randomness
        if randomness is not None:
            self.facts.layout_free |= randomness.drew
            self.facts.own_stream = list(randomness.left)

    def state(self) -> Values:
        """The whole parameters and buffers as they are now. A collective."""
        return {
            "parameter": self.engine.whole_parameters(),
            "buffer": self.engine.whole_buffers(),
        }

    def _cutting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._cut is None else cutting(self._cut)

    def _observe(self) -> None:
        whole = self.engine.whole_gradients()
        self._gradients = {n: g.to_dense() if g.is_sparse else g for n, g in whole.items()}

    def _values(self, loss: float, norm: float | None) -> Values:
        values: Values = {
            "loss": {"": torch.tensor(loss, dtype=torch.float64)},
            "gradient": self._gradients,
            "norm": {},
        }
        if norm is not None:
            values["norm"][""] = torch.tensor(norm, dtype=torch.float64)
        return values | self.state()

    def _note_order(self) -> list[Any]:
        """Hooks that note when each module first runs; what takes them off again."""
        seen = self.facts.order

        def note(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any) -> None:
                if name not in seen:
                    seen.append(name)

            return hook

        return [
            module.register_forward_pre_hook(note(name)).remove
            for name, module in self.engine.model.named_modules()
        ]


def tied(model: nn.Module) -> list[list[str]]:
    """Groups of names under which the model holds one and the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def endless(loader: Loader) -> Iterator[Any]:
    """The loader's batches, epoch after epoch."""
    while True:
        none = True
        for batch in loader:
            none = False
            yield batch
        if none:
            raise DataError("the data yields no batch, so there is no step to verify.")
