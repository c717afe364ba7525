"""Runs of this machine: no engine has them, so their folder says how they are."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError
from paceline.launch.engines.base import RunControl
from paceline.launch.engines.submission import Submission
from paceline.launch.run_folder import holder_of, open_run
from paceline.untrusted import open_file, printable

_POLL_SECONDS = 0.2
_CHUNK = 1 << 16


class LocalRuns(RunControl):
    """Runs that were started on this machine, by hand."""

    @staticmethod
    def submission_of(run: str) -> Submission:
        """What stands for a record where nothing was handed over."""
        folder = Path(run)
        if not (folder / "logs").is_dir():  # of a script's run there is no more
            folder = open_run(run).path
        return Submission("local", str(holder_of(folder) or ""), folder)

    def status(self, submission: Submission) -> str:
        """Whether a launcher of this machine holds the run's folder."""
        return f"process {submission.job}" if submission.job else "no launcher"

    def logs(self, submission: Submission, *, follow: bool) -> int:
        """What rank 0 has written since the run was last started."""
        show_log(
            newest_log(submission.run, 0),
            follow=(lambda: holder_of(submission.run) is not None) if follow else None,
        )
        return 0

    def cancel(self, submission: Submission) -> str:
        """Send SIGTERM to the launcher: its ranks save and leave."""
        pid = holder_of(submission.run)
        if pid is None:
            raise ConfigError(f"{submission.run}: no launcher of this machine has this run.")
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            raise ConfigError(
                f"{submission.run}: process {pid} cannot be ended: {error.strerror}."
            ) from None
        return f"process {pid} was told to save and leave (SIGTERM)"


class StrangersRuns(RunControl):
    """Runs whose folder says that they were handed over, while nothing of it is known here."""

    def status(self, submission: Submission) -> str:
        """What the folder says."""
        return f"job {submission.job} was handed over by another user, or from another machine"

    def logs(self, submission: Submission, *, follow: bool) -> int:
        """What rank 0 has written, where that lies in the folder."""
        show_log(newest_log(submission.run, 0))
        return 0

    def cancel(self, submission: Submission) -> str:
        """Nothing is ended because a folder says so."""
        raise ConfigError(
            f"{submission.run}: {self.status(submission)}. End it where it was started, or by "
            f"{submission.engine} itself."
        )


def newest_log(run: Path, rank: int) -> Path:
    """The log that ``rank`` wrote last: that of the newest attempt, on whichever machine."""
    found = list((run / "logs").glob(f"**/rank{rank}.log"))
    if not found:
        raise ConfigError(f"{run}: rank {rank} has no log here, so far.")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def show_log(path: Path, *, follow: Callable[[], bool] | None = None) -> None:
    """Print a file; and what is added to it while ``follow()`` is true."""
    with open_file(path) as file:
        while True:
            going_on = follow is not None and follow()
            while data := file.read(_CHUNK):
                text = data.decode("utf-8", "replace")
                sys.stdout.write("\n".join(map(printable, text.split("\n"))))
            sys.stdout.flush()
            if not going_on:
                return
            with contextlib.suppress(InterruptedError):
                time.sleep(_POLL_SECONDS)
