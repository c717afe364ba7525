"""What each rank of ``bench wire`` does: one trial after the other, from the same start."""

from __future__ import annotations

import dataclasses
import math
import socket
import time
from collections.abc import Callable

import torch

from paceline.bench.comm import device_name, distinct
from paceline.bench.wire_request import WireChoice, WireRequest
from paceline.bench.wire_result import (
    LEAST_STEPS,
    PLAIN,
    WARM_UP,
    Trial,
    WireResult,
    WireSetting,
    smoothed,
    window,
)
from paceline.bench.wire_training import Training, TrialData
from paceline.config import Config, load
from paceline.data import steps_per_epoch
from paceline.errors import LayoutError, NonFiniteError, TrainingError
from paceline.formatting import binary_size, short_time
from paceline.trainer.run import make_datasets, make_model
from paceline.world import World, collectives

_TOLD_EVERY = 10.0
_PLANNED = 0.65
"""Of the time: the rest is for making engines, evaluations, and formats slower than plain."""
_TIMED_STEPS = WARM_UP + 3
_TIMED_AGAIN = WARM_UP + 8
_NEAR = 0.1

Say = Callable[[str], None]


class Trials:
    """All trials of one request. ``keep`` gets the result anew after each of them."""

    def __init__(
        self, world: World, request: WireRequest, say: Say, keep: Callable[[WireResult], None]
    ) -> None:
        self._world, self._request, self._say, self._keep = world, request, say, keep
        self._config = load(request.config)
        self._wishes = [WireChoice.parse(name) for name in request.formats]
        self._began = time.monotonic()
        torch.manual_seed(self._config.seed)
        model = make_model(self._config)
        self._data = TrialData(*make_datasets(self._config))
        self._longest = _length(self._config, self._data)
        count = sum(p.numel() for p in model.parameters())
        self.result = WireResult(_setting(world, self._config, self._data, count))

    def run(self) -> WireResult:
        """Every rank gets the whole result. A collective."""
        result = self.result
        for number, wish in enumerate(self._wishes):
            if why := self._request.refused.get(wish.name):
                trial = Trial(wish.name, refused=why)
            else:
                left = sum(w.name not in self._request.refused for w in self._wishes[number:])
                trial = self._try(wish, left)
            result.trials.append(trial)
            self._keep(result)
            self._tell(trial)
            if wish.name == PLAIN and not trial.measured:
                return result  # there is nothing to compare others with
        if any(trial.measured for trial in result.trials[1:]):
            result.plain_again = self._plain_again()
        result.complete = True
        self._keep(result)
        return result

    def _tell(self, trial: Trial) -> None:
        if trial.refused or trial.failed or trial.step_seconds is None:
            self._say(f"{trial.format}: {trial.failed or 'not tried'}")
            return
        sent = "" if trial.sent_per_step is None else f", {binary_size(trial.sent_per_step)} sent"
        self._say(f"{trial.format}: {short_time(trial.step_seconds)} a step{sent}")

    def _plain_again(self) -> float:
        """What a step of plain takes now. Some steps for that are made even if the time is up."""
        most = math.floor(self._left() / (self.result.trials[0].step_seconds or 1.0))
        training = Training(self._world, self._config, self._data, WireChoice(PLAIN))
        try:
            self._advance(training, min(_TIMED_AGAIN, max(most, _TIMED_STEPS)))
            return training.step_seconds()
        finally:
            training.close()

    def _left(self) -> float:
        """Seconds until the time is up, as the first rank sees it. A collective."""
        passed = time.monotonic() - self._began
        left: float = collectives.broadcast_object(self._request.seconds - passed)
        return left

    def _try(self, wish: WireChoice, left_to_try: int) -> Trial:
        left = self._left() - _TIMED_AGAIN * (self.result.plain_seconds or 0.0)
        if left <= 0 and wish.name != PLAIN:
            return Trial(wish.name, refused="the time was up; give more --seconds")
        try:
            training = Training(self._world, self._config, self._data, wish)
        except (LayoutError, TrainingError) as error:
            if wish.name == PLAIN:
                raise
            return Trial(wish.name, refused=str(error))
        try:
            return self._measure(training, left, left_to_try)
        except NonFiniteError as error:
            if wish.name == PLAIN:
                raise
            failed = f"its loss or gradient was not finite after {error.step} steps"
            return Trial(wish.name, failed=failed, losses=training.losses)
        finally:
            training.close()

    def _measure(self, training: Training, left: float, left_to_try: int) -> Trial:
        wish, result = training.wish, self.result
        share = left / left_to_try
        losses: dict[int, float] = {}
        timed = _TIMED_STEPS if wish.period == 1 else 2 * wish.period
        if 0 < result.steps <= timed:
            self._evaluate(training, result.steps, losses)
        self._advance(training, timed)
        if wish.name == PLAIN:
            step = training.step_seconds()
            result.steps = by_time = self._common_steps(math.floor(_PLANNED * share / step))
            self._tell_duration(step, left_to_try)
        else:
            by_time = self._go_to_equal_time(training, share, losses)
        if training.steps < result.steps <= self._most(training, share) or wish.name == PLAIN:
            self._evaluate(training, result.steps, losses)
        return self._finish(training, losses, by_time)

    def _most(self, training: Training, share: float) -> int:
        """How many steps fit into ``share`` seconds, and into the run. A collective."""
        most = math.floor(share / training.step_seconds())
        return max(most if self._longest is None else min(most, self._longest), LEAST_STEPS)

    def _go_to_equal_time(self, training: Training, share: float, losses: dict[int, float]) -> int:
        """Train as many steps as fit into plain's time, and evaluate there; how many that are.

        What a step takes changes while it trains: it goes half of the way, and looks again.
        """
        result, period = self.result, training.wish.period
        assert result.equal_seconds is not None
        while True:
            fits = math.floor(result.equal_seconds / training.step_seconds())
            fits = min(fits, self._most(training, share))
            fits -= fits % period if fits >= period else 0
            ahead = fits - training.steps
            if ahead <= 0:
                break
            half = training.steps + max(period, ahead // 2 // period * period)
            goal = fits if ahead <= max(period, fits * _NEAR) else half
            if training.steps < result.steps <= goal:
                self._evaluate(training, result.steps, losses)
            elif goal >= fits / 2:  # this may turn out to be as far as it gets
                self._evaluate(training, goal, losses)
            else:
                self._advance(training, goal)
        if result.setting.loss == "training":
            return min(fits, training.steps)
        if training.steps <= fits and training.steps not in losses:
            self._evaluate(training, training.steps, losses)
        in_time = [steps for steps in losses if fits / 2 <= steps <= fits * (1 + _NEAR)]
        return max(in_time, default=fits)

    def _evaluate(self, training: Training, steps: int, losses: dict[int, float]) -> None:
        self._advance(training, steps)
        found = training.validation_loss()
        if found is not None:
            losses[steps] = found

    def _finish(self, training: Training, losses: dict[int, float], by_time: int) -> Trial:
        """A trial from what was measured; ``losses`` are those on validation data, by step."""
        result, width = self.result, window(self.result.steps)
        if result.setting.loss == "training":
            marks = [mark for mark in (result.steps, by_time) if 0 < mark <= training.steps]
            losses = {mark: smoothed(training.losses, mark, width) for mark in marks}
        self._fill_in(training.plain_per_step())
        bad = next((n for n, x in enumerate(training.losses, 1) if not math.isfinite(x)), None)
        return Trial(
            training.wish.name,
            failed="" if bad is None else f"its loss was not finite at step {bad}",
            step_seconds=training.step_seconds(),
            sent_per_step=training.sent_per_step(),
            loss_at_steps=losses.get(result.steps),
            loss_at_time=losses.get(by_time),
            steps_at_time=by_time,
            meetings=self._meetings(training.wish),
            losses=training.losses,
            seconds=training.seconds(),
        )

    def _meetings(self, wish: WireChoice) -> int | None:
        """How often ranks met in the steps that all have in common; ``None`` without momentum."""
        rounds = wish.apply(self._config).local_steps
        if rounds.every is None or rounds.method != "diloco" or not rounds.outer_momentum:
            return None
        return self.result.steps // rounds.every

    def _fill_in(self, plain_bytes: float | None) -> None:
        """What plain sends, where only a compressed trial can tell (``zero``)."""
        trials = self.result.trials
        if plain_bytes and trials and trials[0].sent_per_step is None:
            trials[0] = dataclasses.replace(trials[0], sent_per_step=plain_bytes)

    def _advance(self, training: Training, steps: int) -> None:
        told = time.monotonic()
        for step in training.run(steps):
            if time.monotonic() - told > _TOLD_EVERY:
                told = time.monotonic()
                loss = f", loss {training.losses[-1]:.4g}" if training.losses else ""
                self._say(f"{training.wish.name}: {step} of {steps} steps{loss}")

    def _common_steps(self, most: int) -> int:
        """As many as were asked for and fit; whole rounds, where some train in rounds."""
        longest = self._request.steps if self._longest is None else self._longest
        steps = max(min(self._request.steps, most, longest), LEAST_STEPS)
        period = max(wish.period for wish in self._wishes)
        return steps - steps % period if steps >= period else steps

    def _tell_duration(self, step: float, trials: int) -> None:
        steps = self.result.steps
        seconds = min(trials * steps * step * 1.25, self._request.seconds)
        shorter = ""
        if steps < self._request.steps:
            shorter = f" (of {self._request.steps} asked for, to be done in --seconds)"
        self._say(
            f"plain takes {short_time(step)} a step. Each format trains {steps} steps{shorter}, or "
            f"as many more as fit into the {short_time(steps * step)} that plain needs for them: "
            f"about {_minutes(seconds)} for {trials} formats. Ctrl-C shows what is known by then."
        )


def _length(config: Config, data: TrialData) -> int | None:
    """How many steps the run has: a trial has no more."""
    if config.train.steps is not None:
        return config.train.steps
    if config.train.epochs is None or not hasattr(data.train, "__len__"):
        return None
    batch, drop = config.batch.global_batch, config.data.drop_last
    return config.train.epochs * steps_per_epoch(len(data.train), batch, drop)


def _setting(world: World, config: Config, data: TrialData, parameters: int) -> WireSetting:
    places = collectives.all_gather_object((world.node, socket.gethostname()))
    numbers = sorted({node for node, _ in places})
    hosts = [next(host for node, host in places if node == number) for number in numbers]
    return WireSetting(
        machines=distinct(hosts),
        ranks=[sum(node == number for node, _ in places) for number in numbers],
        device=device_name(world),
        backend=world.backend,
        torch=torch.__version__,
        model=config.model.target,
        parameters=parameters,
        layout=config.layout,
        loss="training" if data.val is None else "validation",
    )


def _minutes(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
