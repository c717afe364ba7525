"""What ``bench wire`` recommends, by made-up trials."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from paceline.bench.wire_advice import Advice, recommend, tolerance
from paceline.bench.wire_result import (
    Trial,
    WireResult,
    WireSetting,
    noise,
    smoothed,
    typical_seconds,
    window,
)

STEPS = 100
SECONDS = 1.0  # a step of plain
MiB = 2.0**20


def curve(steps: int, *, rate: float = 1.0, scatter: float = 0.02, seed: int = 0) -> list[float]:
    """A loss that goes from 5.5 towards 1.5, and scatters from batch to batch."""
    dice = random.Random(seed)
    return [1.5 + 4 * math.exp(-0.015 * rate * n) + dice.gauss(0, scatter) for n in range(steps)]


def trial(
    name: str, seconds: float, *, rate: float = 1.0, scatter: float = 0.02, fewer: float = 1.0
) -> Trial:
    """A format with so many seconds a step, that learns ``rate`` times as fast as plain."""
    by_time = math.floor(STEPS * SECONDS / seconds)
    # The same batches, and so the same scatter at the same step.
    losses = curve(max(STEPS, by_time), rate=rate, scatter=scatter)
    return Trial(
        name,
        step_seconds=seconds,
        sent_per_step=4 * MiB / fewer,
        loss_at_steps=smoothed(losses, STEPS, window(STEPS)),
        loss_at_time=smoothed(losses, by_time, window(STEPS)),
        steps_at_time=by_time,
        losses=losses,
        seconds=[seconds] * len(losses),
    )


def advice(*trials: Trial, steps: int = STEPS, again: float | None = None) -> Advice:
    found = recommend([trial("none", SECONDS), *trials], steps, again)
    assert found is not None
    assert found.format in {"none", *(one.format for one in trials)}
    return found


def test_on_a_fast_link_nothing_pays() -> None:
    found = advice(trial("fp16", 1.02, fewer=2), trial("topk:0.01", 1.4, fewer=44))
    assert (found.format, found.pays) == ("none", False)
    assert "does not pay here: every format that was tried is slower than plain." in found.reason
    assert "Plain takes 1 s, the fastest other, fp16, 1.02 s" in found.reason
    assert found.remarks == []


def test_slower_formats_are_called_so_however_much_plain_varies() -> None:
    found = advice(trial("int8", 1.4), trial("fp16", 1.6), again=1.8)
    assert "every format that was tried is slower than plain. Plain takes 1 s" in found.reason
    assert "%" not in found.reason


def test_a_little_faster_is_not_worth_it() -> None:
    found = advice(trial("fp16", 0.97, fewer=2))
    assert found.format == "none"
    assert "no format makes a step more than 5% faster. Plain takes 1 s" in found.reason
    assert advice(trial("fp16", 0.9, fewer=2)).format == "fp16"


def test_on_a_slow_link_the_fastest_that_learns_as_well() -> None:
    found = advice(trial("fp16", 0.55, fewer=2), trial("powersgd:4", 0.1, fewer=40))
    assert (found.format, found.pays) == ("powersgd:4", True)
    assert "100 ms a step, 10 times as fast as plain (1 s), 40 times fewer bytes" in found.reason
    assert "no worse (differences up to" in found.reason


def test_of_two_equally_fast_the_one_with_the_lower_loss() -> None:
    found = advice(trial("topk:0.01", 0.1, rate=0.995), trial("powersgd:4", 0.102))
    assert found.format == "powersgd:4"


def test_worse_after_equal_steps_and_after_equal_time_is_never_recommended() -> None:
    found = advice(trial("randomk:0.01", 0.5, rate=0.3, fewer=90))
    assert (found.format, found.pays) == ("none", False)
    assert "learn less in the same time than plain" in found.reason
    assert "randomk:0.01 (2 times as fast a step, loss" in found.reason


def test_worse_after_equal_steps_but_better_after_equal_time_is_said() -> None:
    found = advice(trial("topk:0.01", 0.05, rate=0.5, fewer=44), trial("fp16", 0.6, fewer=2))
    assert (found.format, found.pays) == ("topk:0.01", True)
    assert "Its loss after 100 steps is worse" in found.reason
    assert "it has made 2000 steps, and its loss is better" in found.reason
    assert "or take fp16, whose loss keeps up, at 1.67 times the speed of plain" in found.remarks[0]


def test_one_that_is_behind_must_be_better_by_time_than_one_that_keeps_up() -> None:
    # In plain's 100 s: 333 steps that are worth half, or 200 that are worth as much.
    found = advice(trial("topk:0.01", 0.3, rate=0.5), trial("int8", 0.5))
    assert found.format == "int8"


def test_noise_hides_small_differences_and_not_large_ones() -> None:
    quiet, noisy = trial("none", SECONDS, scatter=0.001), trial("none", SECONDS, scatter=0.3)
    assert tolerance(quiet, STEPS) < 0.005 < 0.1 < tolerance(noisy, STEPS) < 0.6
    behind = trial("int8", 0.9, rate=0.88, scatter=0.001)
    by_quiet, by_noisy = recommend([quiet, behind], STEPS), recommend([noisy, behind], STEPS)
    assert by_quiet is not None
    assert by_noisy is not None
    assert (by_quiet.format, by_noisy.format) == ("none", "int8")


def test_diverged_and_refused_ones_are_left_out() -> None:
    found = advice(
        dataclasses.replace(trial("sign", 0.1), failed="its loss was not finite at step 7"),
        Trial("powersgd:4", refused="zero=2"),
        trial("int8", 0.5),
    )
    assert found.format == "int8"
    alone = advice(Trial("powersgd:4", refused="zero=2"))
    assert (alone.format, alone.reason) == ("none", "nothing else was measured.")


def test_plain_that_was_not_measured() -> None:
    assert recommend([], STEPS) is None
    assert recommend([Trial("none", failed="not finite"), trial("int8", 0.5)], STEPS) is None


def test_too_short_to_judge() -> None:
    few = advice(trial("topk:0.01", 0.1), steps=10)
    assert "10 steps are too few to judge convergence by" in few.remarks[0]
    flat = dataclasses.replace(trial("none", SECONDS), losses=[5.5 - n / 1e4 for n in range(STEPS)])
    noisy = [x + random.Random(n).gauss(0, 0.05) for n, x in enumerate(flat.losses)]
    found = recommend([dataclasses.replace(flat, losses=noisy), trial("int8", 0.5)], STEPS)
    assert found is not None
    assert "little more than noise: too short to judge convergence by" in found.remarks[0]


def test_too_slow_for_the_common_steps_is_told() -> None:
    slow = dataclasses.replace(trial("topk:0.01", 5), loss_at_steps=None)
    found = advice(slow)
    assert found.format == "none"
    assert any("too slow to make 100 steps" in text for text in found.remarks)


def test_local_steps_that_are_behind_after_few_meetings_are_explained() -> None:
    behind = dataclasses.replace(trial("local:10", 0.5, rate=0.3), meetings=10)
    (told,) = advice(behind).remarks
    assert told.startswith("local:10: 100 steps are 10 meetings, and DiLoCo's outer momentum needs")
    assert "try local:10:average" in told
    keeps_up = dataclasses.replace(trial("local:10", 0.5), meetings=10)
    assert advice(keeps_up).remarks == []
    many = dataclasses.replace(behind, meetings=50)
    assert advice(many).remarks == [], "then its loss says something"
    average = trial("local:10:average", 0.5, rate=0.3)
    assert advice(average).remarks == [], "which has no momentum"


def test_machines_that_became_busy_or_idle() -> None:
    found = advice(trial("fp16", 0.9), again=0.5)
    assert found.format == "none", "plain is faster than that, now"
    assert "plain took 1 s a step at first, and 500 ms after" in found.remarks[0]
    assert advice(trial("fp16", 0.5), again=1.05).remarks == []
    assert advice(trial("fp16", 0.5), again=1.5).reason.startswith("500 ms a step, 2 times")
    lost = advice(trial("fp16", 0.5), again=3.0)
    assert lost.format == "none", "2 times as fast, where plain itself varies by 3"
    assert "more than 200% faster, by which plain's own time has changed meanwhile" in lost.reason


def test_what_a_step_takes() -> None:
    assert typical_seconds([9.0, 8.0, 1.0, 3.0, 2.0]) == 2.0, "the first two do not count"
    assert typical_seconds([9.0]) == 9.0
    # Rounds of three, each with one step that waits: their mean, not the median of steps.
    rounds = [5.0, 5.0, 9.0] + [1.0, 1.0, 4.0] * 3
    assert typical_seconds(rounds, 3) == pytest.approx(2.0)
    assert typical_seconds(rounds[:3], 3) == pytest.approx(19 / 3)


def test_noise_is_not_what_was_learnt() -> None:
    assert noise([10.0 - n for n in range(30)], 10) == pytest.approx(0.0)
    assert noise([1.0, 2.0], 1) == 0.0
    dice = random.Random(1)
    scattered = [5 - 0.1 * n + dice.gauss(0, 0.5) for n in range(200)]
    # Two standard errors of the difference of two means over 10: 2 · 0.5 · √(2/10) = 0.45.
    assert noise(scattered, 10) == pytest.approx(0.45, rel=0.5)


def test_result_goes_to_json_and_back() -> None:
    setting = WireSetting(["a"], [2], "CPU", "gloo", "2.13", "m:M", 10, "dp=2", "training")
    broken = dataclasses.replace(trial("sign", 0.1), losses=[1.0, math.nan], loss_at_steps=math.inf)
    result = WireResult(setting, STEPS, [trial("none", 1.0), broken], 0.9, complete=True)
    back = WireResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert back.trials[0] == result.trials[0]
    assert math.isnan(back.trials[1].losses[1])
    assert (back.plain_again, back.complete, back.equal_seconds) == (0.9, True, 100.0)
