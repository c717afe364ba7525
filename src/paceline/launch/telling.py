"""What the end of a world sounds like: in the run's events, on the console, as an error."""

from __future__ import annotations

from paceline.errors import LaunchError, RankFailed
from paceline.events import Event, GaveUp, RankLost, Restarting, RunFailed
from paceline.launch.verdicts import Verdict


def events(verdict: Verdict) -> list[Event]:
    """What a verdict adds to the events of the run."""
    ending, decision = verdict.ending, verdict.decision
    told: list[Event] = []
    rank = -1 if verdict.rank is None else verdict.rank
    broken = ending.kind in ("failure", "hang")
    if broken:
        failed = ending.kind == "failure"
        told.append(
            RankLost(
                rank=rank,
                host=verdict.host,
                cause="failed" if failed else "hang",
                error=ending.error,
                exit_code=verdict.exit_code if failed else None,
                step=ending.step,
                log=verdict.log,
                told_at_end=ending.refused and not decision.restart,
            )
        )
    if decision.restart:
        told.append(
            Restarting(
                reason=ending.kind,
                detail=_what(verdict),
                delay=decision.delay,
                used=decision.used,
                budget=decision.budget,
            )
        )
    elif broken or decision.budget is not None:
        told.append(GaveUp(reason=decision.reason))
    if broken and not decision.restart:
        told.append(RunFailed(rank=rank, error=ending.error, exit_code=verdict.exit_code or 1))
    return told


def restarting(verdict: Verdict) -> str:
    """Why and when the ranks are started again, in one line."""
    decision = verdict.decision
    after = f" in {decision.delay:g} s" if decision.delay else ""
    count = f", restart {decision.used} of {decision.budget}" if decision.budget is not None else ""
    log = f". Its log: {verdict.log}" if verdict.log else ""
    return f"{_what(verdict)}; all ranks are started again{after}{count}{log}"


def _what(verdict: Verdict) -> str:
    failed = verdict.ending.kind == "failure"
    error = verdict.ending.error
    return f"rank {verdict.rank} failed ({error})" if failed else error


def error(verdict: Verdict) -> LaunchError:
    """The error of a run that is over because of what its launchers agreed on."""
    if verdict.ending.kind in ("failure", "hang"):
        hang = f"The run hung: {verdict.ending.error}\n\nNot started again: "
        return RankFailed(
            verdict.report or f"{hang}{verdict.decision.reason}.",
            rank=-1 if verdict.rank is None else verdict.rank,
            exit_code=verdict.exit_code or 1,
            would_recur=verdict.decision.would_recur,
        )
    return LaunchError(f"the run is over: {verdict.decision.reason}.")


def interrupted(host: str) -> str:
    """Why all ranks leave when one launcher gets a Ctrl-C."""
    return f"it was stopped by Ctrl-C on {host}"


def told_to_leave(host: str) -> str:
    """Why ranks leave when their launcher gets a SIGTERM."""
    return f"{host} was told to leave"


def nodes_waiting(number: int) -> str:
    """Why a world makes room for a new one."""
    return "1 node waits to join" if number == 1 else f"{number} nodes wait to join"


def standing_by(idle: int, used: int) -> str:
    """What is said of ranks that have no place."""
    if used == 0:
        return f"waiting for more machines: the layout does not fit on {idle} ranks"
    what = "1 rank stands" if idle == 1 else f"{idle} ranks stand"
    return f"{what} by: the layout has no place for more than {used}"
