"""One trial's training: an engine of its own from the same start, and a clock that can stop."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bench.wire_request import WireChoice
from paceline.bench.wire_result import typical_seconds
from paceline.config import Config
from paceline.data import Loader, loader
from paceline.engine import Engine, StepResult
from paceline.engine.internals import internals_of
from paceline.layout import Layout
from paceline.sync.deferred_numbers import LAG
from paceline.sync.traffic import plain_bytes
from paceline.trainer.config_parts import make_collate, make_optimizer
from paceline.trainer.evaluate import evaluate
from paceline.trainer.run import engine_options, make_loss, make_model
from paceline.world import World, collectives

_EVALUATED_BATCHES = 8


@dataclass(frozen=True)
class TrialData:
    """The datasets of all trials."""

    train: Any
    val: Any


class Training:
    """What ``paceline train`` would do with ``wish``, step by step. Every rank has one."""

    def __init__(self, world: World, config: Config, data: TrialData, wish: WireChoice) -> None:
        config = wish.apply(config)
        self.wish, self._world, self._config = wish, world, config
        torch.manual_seed(config.seed)
        model = make_model(config)
        optimizer = make_optimizer(config, model)
        model.train()
        world.seed(config.seed)
        self.engine = Engine(
            model,
            optimizer=optimizer,
            loss=make_loss(config),
            world=world,
            **engine_options(config, data.train, optimizer, Layout.parse(config.layout)),
        )
        self._train = self._loader(data.train, training=True)
        self._val = None if data.val is None else self._loader(data.val, training=False)
        self._batches = _endless(self._train)
        self.losses: list[float] = []
        self._seconds: list[float] = []
        self._sent: list[float] = []
        self._beside = 0.0  # sent for an evaluation, which a run would not do at this step
        self._unread: list[StepResult] = []

    def _loader(self, data: Any, *, training: bool) -> Loader:
        options = self._config.data
        return loader(
            data,
            global_batch=self._config.batch.global_batch,
            seed=self._config.seed,
            shuffle=None if training and options.shuffle else False,
            drop_last=options.drop_last and training,
            workers=options.workers,
            pin_memory=options.pin_memory,
            collate_fn=make_collate(self._config),
            layout=self.engine.layout,
            sharded_by_rank=options.sharded_by_rank,
            compare=options.compare,
        )

    @property
    def steps(self) -> int:
        """Made so far."""
        return len(self._seconds)

    def run(self, steps: int) -> Iterator[int]:
        """Train up to ``steps`` steps; gives the number of each when it is done.

        What is done with it does not count as time.
        """
        while self.steps < steps:
            started = time.perf_counter()
            batch = next(self._batches)
            self._unread.append(self.engine.step(batch))
            # As the trainer does: reading a loss waits, for a GPU or for other replicas.
            behind = 0 if self._world.device.type == "cpu" else 1
            self._read(LAG if self.engine.in_round else behind)
            self._seconds.append(time.perf_counter() - started)
            self._sent.append(self._sent_so_far() - self._beside)
            yield self.steps
        self.engine.settle()
        self._read(0)

    def _read(self, behind: int) -> None:
        while len(self._unread) > behind:
            self.losses.append(self._unread.pop(0).loss)

    def validation_loss(self) -> float | None:
        """Of the model as a run that ended here would leave it; ``None`` without such data."""
        if self._val is None:
            return None
        before = self._sent_so_far()
        self.engine.meet()
        self._beside += self._sent_so_far() - before
        asked = self._config.train.eval_batches
        batches = min(asked or _EVALUATED_BATCHES, _EVALUATED_BATCHES)
        values, _, _ = evaluate(self.engine, self._val, {}, batches=batches)
        return values["loss"]

    def seconds(self) -> list[float]:
        """Those of each step, of the slowest rank. A collective."""
        return [max(own) for own in zip(*collectives.all_gather_object(self._seconds), strict=True)]

    def step_seconds(self) -> float:
        """What a step takes, so far. A collective."""
        return typical_seconds(self.seconds(), self.wish.period)

    def sent_per_step(self) -> float | None:
        """Bytes of gradients, of the rank that sends most; ``None``: not counted. A collective."""
        whole = self.steps // self.wish.period * self.wish.period or self.steps
        own = self._sent[whole - 1] / whole
        if self.engine.traffic() is None:
            own = 0.0 if self.engine.layout.zero else plain_bytes(internals_of(self.engine).replica)
        return max(collectives.all_gather_object(own)) or None

    def plain_per_step(self) -> float | None:
        """What the same steps would have sent uncompressed, likewise. A collective."""
        traffic = self.engine.traffic()
        own = 0.0 if traffic is None else traffic.plain / self.steps
        return max(collectives.all_gather_object(own)) or None

    def _sent_so_far(self) -> float:
        traffic = self.engine.traffic()
        return 0.0 if traffic is None else traffic.sent

    def close(self) -> None:
        """End its threads and workers, and let go of the model: another one takes its place."""
        engine = self.engine
        internals_of(engine).sync.close()
        self._batches.close()
        self._train.close()
        if self._val is not None:
            self._val.close()
        self._unread.clear()
        del engine, self.engine, self._batches
        gc.collect()  # engines and their parts know each other
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()


def _endless(batches: Loader) -> Any:
    while True:
        yield from batches
