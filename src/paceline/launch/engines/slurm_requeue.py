"""Whether a run that was told to leave goes back into SLURM's queue: asked by its batch script.

``python -m paceline.launch.engines.slurm_requeue RUN [MOST] [--preempted]`` exits with 0 if it
does. It does not after ``MOST`` times (``launch.max_preemptions``); nor, at a time limit, where
nothing was saved since the last one, as the next time would end the same way.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from paceline.events import CheckpointSaved, read
from paceline.launch.run_folder import SUBMISSION
from paceline.untrusted import read_text, write_private

_FILE = "requeued-at-step"
_LONGEST_NUMBER = 32


def why_not(run: Path, requeued: int, most: int | None, *, preempted: bool = False) -> str | None:
    """Why the run in ``run``, requeued so often before, is not requeued; ``None``: it is."""
    if most is not None and requeued >= most:
        return f"it was requeued {requeued} times, and launch.max_preemptions is {most}"
    if preempted:  # it may have had no time for anything
        return None
    step = last_saved(run)
    if step is None:  # a script's run has no events: what it saves is its own affair
        return None if not (run / "config.yaml").exists() else _nothing_new(run, -1)
    return _nothing_new(run, step)


def last_saved(run: Path) -> int | None:
    """The step of the newest checkpoint that the run has told of."""
    saved = None
    with contextlib.suppress(OSError):
        for event in read(run):
            if isinstance(event, CheckpointSaved):
                saved = event.step
    return saved


def _nothing_new(run: Path, step: int) -> str | None:
    """Compare with the step at which it was asked before, and note this one."""
    file = run / SUBMISSION / _FILE
    try:
        before = int(read_text(file, _LONGEST_NUMBER))
    except (OSError, ValueError):
        before = None
    if before is not None and step <= before:
        return (
            "nothing was saved since the last time limit. Give it more time (launch.slurm.time), "
            "or more to save in (launch.slurm.save_before, launch.grace)"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, str(step).encode())
    return None


def main(arguments: list[str]) -> int:
    """Decide, and say so."""
    preempted = "--preempted" in arguments
    run, *most = (word for word in arguments if word != "--preempted")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    requeued = int(restarts) if restarts.isdecimal() else 0
    reason = why_not(Path(run), requeued, int(most[0]) if most else None, preempted=preempted)
    if reason is not None:
        print(f"paceline: the run is not requeued: {reason}.", file=sys.stderr, flush=True)
        return 1
    print("paceline: the run is requeued, and goes on from what it saved", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
