"""Runs that never took place: their events, written by hand on a clock of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.diagnose.story.rank_logs import LogEvidence, evidence_in
from paceline.events import (
    CheckpointSaved,
    Event,
    GaveUp,
    HangFound,
    RankLost,
    RanksStarted,
    Restarting,
    RestoreTried,
    RunFailed,
    RunFinished,
    RunStarted,
    StepDone,
)

STARTUP = 4.0
"""Seconds from the start of ranks to training; a step takes one."""


class MadeUpRun:
    """Events one after the other; every method returns the run, to be chained."""

    def __init__(self, *, total: int = 100, batch: int = 8, epoch: int = 64) -> None:
        self.events: list[Event] = []
        self.clock = 1_000_000.0
        self.done = 0
        self.attempt = -1
        self.total, self.batch, self.epoch = total, batch, epoch

    def say(self, kind: type[Event], *, after: float = 0.0, **values: Any) -> MadeUpRun:
        """Any event, ``after`` seconds."""
        self.clock += after
        self.events.append(kind(time=self.clock, **values))
        return self

    def start(
        self,
        first: int = 0,
        *,
        nodes: tuple[str, ...] = ("alpha",),
        precision: str = "fp32",
        tried: Sequence[tuple[str, int | None, str]] = (),
    ) -> MadeUpRun:
        """Ranks come up, two a node, and train from step ``first`` on.

        ``tried`` are places to resume from (rung, step, problem) and what was wrong with them.
        """
        self.attempt += 1
        size = 2 * len(nodes)
        self.say(RanksStarted, nproc=2, attempt=self.attempt, world_size=size, nodes=list(nodes))
        for rung, step, problem in tried:
            values = dict(rung=rung, step=step, ok=not problem, detail=problem, seconds=0.1)
            self.say(RestoreTried, **values)
        self.done = first
        return self.say(
            RunStarted,
            after=STARTUP,
            layout=f"dp={size}",
            world_size=size,
            device="cpu",
            precision=precision,
            global_batch=self.batch,
            parameters=4,
            samples_per_epoch=self.epoch,
            total_steps=self.total,
            first_step=first,
        )

    def steps(self, last: int, *, loss: float = 1.0, growth: float = 1.0) -> MadeUpRun:
        """Steps up to ``last``, a second each; the loss grows by a factor each step."""
        for step in range(self.done + 1, last + 1):
            self.say(
                StepDone,
                after=1.0,
                step=step,
                epoch=(step - 1) * self.batch // self.epoch,
                loss=loss * growth**step,
                lr=0.1,
                samples=self.batch,
                seconds=1.0,
            )
        self.done = last
        return self

    def save(self, stalled: float = 0.25) -> MadeUpRun:
        """A checkpoint of the last step."""
        return self.say(
            CheckpointSaved,
            step=self.done,
            path=f"runs/x/checkpoints/step-{self.done}",
            bytes=1000,
            seconds=1.0,
            reason="every",
            stalled=stalled,
        )

    def lose(
        self,
        rank: int = 1,
        error: str = "killed by SIGKILL: often the machine ran out of memory",
        *,
        host: str = "alpha",
        exit_code: int | None = -9,
        cause: str = "failed",
        log: str = "",
    ) -> MadeUpRun:
        """A rank ends."""
        return self.say(
            RankLost,
            rank=rank,
            host=host,
            cause=cause,
            error=error,
            exit_code=exit_code,
            step=self.done,
            log=log,
        )

    def restart(self, used: int = 1, budget: int | None = 3, reason: str = "failure") -> MadeUpRun:
        """The launcher decides to start the ranks again."""
        return self.say(Restarting, reason=reason, detail="", used=used, budget=budget)

    def hang(self, what: str = "code", *, seconds: float = 60.0, action: str = "wait") -> MadeUpRun:
        """Nothing moves, because of rank 1."""
        return self.say(
            HangFound,
            after=seconds,
            step=self.done,
            seconds=seconds,
            what=what,
            ranks=[1],
            summary="rank 1 is missing from all_reduce 7",
            detail="rank 0: all_reduce 7, float32[4]\nrank 1: in train.py:12 work()",
            action=action,
        )

    def give_up(self, reason: str = "3 restarts in a row did not help") -> MadeUpRun:
        """The launcher does not start it again."""
        self.say(GaveUp, reason=reason)
        return self.say(RunFailed, rank=1, error="see above", exit_code=1)

    def finish(self, reason: str = "done") -> MadeUpRun:
        """The ranks leave by themselves."""
        return self.say(
            RunFinished,
            reason=reason,
            step=self.done,
            epoch=0,
            samples=self.done * self.batch,
            seconds=float(self.done),
        )


class MadeUpLogs:
    """Logs by (attempt, rank)."""

    def __init__(self, texts: dict[tuple[int, int], str]) -> None:
        self._texts = texts

    def of(self, attempt: int, rank: int, log: str = "") -> LogEvidence | None:
        text = self._texts.get((attempt, rank))
        return None if text is None else evidence_in(text, f"logs/{attempt}/rank{rank}.log")

    def of_all(self, attempt: int) -> list[LogEvidence]:
        found = [self.of(a, rank) for a, rank in sorted(self._texts) if a == attempt]
        return [log for log in found if log is not None]
