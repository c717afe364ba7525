"""The outcome of a world that ended before its time: why, what follows, and how that is reported.

It is reported in the run's events, on the console and, when the run is over, as an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import LaunchError, RankFailed
from paceline.events import Event, GaveUp, RankLost, Restarting, RunFailed
from paceline.launch.messages import decode, encode
from paceline.launch.restart_policy import Decision, Ending


@dataclass(frozen=True)
class WorldOutcome:
    """Why a world ended and what follows, as decided by the launcher of ``host``.

    ``rank``, ``exit_code`` and ``log`` are those of the rank to blame, if one is. ``report`` is
    what a person should read when the run is over because of it.
    """

    ending: Ending
    decision: Decision
    host: str
    rank: int | None = None
    exit_code: int | None = None
    log: str = ""
    report: str = ""

    @property
    def orderly(self) -> bool:
        """The ranks save and leave together; otherwise some are gone and the rest cannot save."""
        return self.ending.kind in ("preemption", "node_joined")

    def to_json(self) -> str:
        """As one line of text."""
        return encode(self)

    @staticmethod
    def from_json(text: str) -> WorldOutcome:
        """What ``to_json`` wrote."""
        return decode(WorldOutcome, text)

    def events(self) -> list[Event]:
        """What this outcome adds to the events of the run."""
        ending, decision = self.ending, self.decision
        found: list[Event] = []
        rank = -1 if self.rank is None else self.rank
        broken = ending.kind in ("failure", "hang")
        if broken:
            failed = ending.kind == "failure"
            found.append(
                RankLost(
                    rank=rank,
                    host=self.host,
                    cause="failed" if failed else "hang",
                    error=ending.error,
                    exit_code=self.exit_code if failed else None,
                    step=ending.step,
                    log=self.log,
                    told_at_end=ending.refused and not decision.restart,
                )
            )
        if decision.restart:
            found.append(
                Restarting(
                    reason=ending.kind,
                    detail=self._cause(),
                    delay=decision.delay,
                    used=decision.used,
                    budget=decision.budget,
                )
            )
        elif broken or decision.budget is not None:
            found.append(GaveUp(reason=decision.reason))
        if broken and not decision.restart:
            found.append(RunFailed(rank=rank, error=ending.error, exit_code=self.exit_code or 1))
        return found

    def restart_notice(self) -> str:
        """Why and when the ranks are started again, in one line."""
        decision = self.decision
        after = f" in {decision.delay:g} s" if decision.delay else ""
        count = (
            f", restart {decision.used} of {decision.budget}" if decision.budget is not None else ""
        )
        log = f". Its log: {self.log}" if self.log else ""
        return f"{self._cause()}; all ranks are started again{after}{count}{log}"

    def to_error(self) -> LaunchError:
        """The error of a run that is over because of this outcome."""
        if self.ending.kind in ("failure", "hang"):
            hang = f"The run hung: {self.ending.error}\n\nNot started again: "
            return RankFailed(
                self.report or f"{hang}{self.decision.reason}.",
                rank=-1 if self.rank is None else self.rank,
                exit_code=self.exit_code or 1,
                would_recur=self.decision.would_recur,
            )
        return LaunchError(f"the run is over: {self.decision.reason}.")

    def _cause(self) -> str:
        failed = self.ending.kind == "failure"
        return f"rank {self.rank} failed ({self.ending.error})" if failed else self.ending.error


# Causes and notices, in words.

RUN_IS_DONE = "the run is done"
"""Why a run is closed that has come to its end: all nodes with ranks were done."""


def interrupted(host: str) -> str:
    """Why all ranks leave when one launcher gets a Ctrl-C."""
    return f"it was stopped by Ctrl-C on {host}"


def told_to_leave(host: str) -> str:
    """Why ranks leave when their launcher gets a SIGTERM."""
    return f"{host} was told to leave"


def nodes_waiting(number: int) -> str:
    """Why a world makes room for a new one."""
    return "1 node waits to join" if number == 1 else f"{number} nodes wait to join"


def idle_ranks(idle: int, used: int) -> str:
    """The notice about ranks that the layout does not use."""
    if used == 0:
        return f"waiting for more machines: the layout does not fit on {idle} ranks"
    what = "1 rank stands" if idle == 1 else f"{idle} ranks stand"
    return f"{what} by: the layout has no place for more than {used}"
