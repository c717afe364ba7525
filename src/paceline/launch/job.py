"""What to run on the ranks of this machine, and how: the job that a launcher is given."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import LaunchError
from paceline.launch.restart_policy import RestartLimits
from paceline.untrusted import printable

if TYPE_CHECKING:
    from paceline.launch.hang_watcher import HangWatcher
    from paceline.launch.rendezvous.handler import LauncherRendezvous

RANK_BYTES = 100 << 20
"""What a process that has imported torch needs for itself alone, rounded down."""


def to_stdout(text: str) -> None:
    """Show what rank 0 writes, as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def to_stderr(message: str) -> None:
    """Show a notice of the launcher."""
    print(printable(message), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class LocalJob:
    """What to run, and on how many ranks of this machine.

    ``command`` is what follows ``python -m paceline.launch.worker``: ``["script", FILE, *args]``,
    ``["-m", MODULE, *args]`` or ``["--call", FOLDER]``. Logs go to ``log_dir/rank<r>.log``, those
    of later starts (a restart, a resumed run) to ``log_dir/attempt<k>/rank<r>.log``. With an
    ``events_dir`` the launcher adds its own events to the run's. ``output`` gets rank 0's output
    as it comes (``None``: only the log does), ``notice`` the notices of the launcher.

    ``limits`` say how often ranks are started again; with ``standby``, processes are kept ready for
    it. ``rendezvous`` makes the one with the launchers of other nodes (``None``: there are none),
    ``host`` is the name of this one; ``node_logs`` puts each node's logs into a folder of its own
    when there are several. ``usable_ranks`` says how many ranks of a world of a given size are used
    (``None``: all). ``hang_watcher`` makes what watches the ranks for hangs.
    """

    command: Sequence[str]
    nproc: int
    log_dir: Path
    limits: RestartLimits = field(default_factory=RestartLimits)
    events_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 15.0
    output: Callable[[str], None] | None = to_stdout
    notice: Callable[[str], None] = to_stderr
    standby: bool = False
    rendezvous: Callable[[], LauncherRendezvous] | None = None
    host: str = field(default_factory=platform.node)
    node_logs: bool = True
    usable_ranks: Callable[[int], int] | None = None
    hang_watcher: Callable[[], HangWatcher] | None = None

    def __post_init__(self) -> None:
        check_nproc(self.nproc)
        if self.grace < 0:
            raise LaunchError(f"grace={self.grace} must be 0 seconds or more.")


def check_nproc(nproc: object, memory: int | None = None) -> None:
    """Refuse a number of ranks that is below 1, or cannot fit into this machine's ``memory``."""
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise LaunchError(f"nproc={nproc!r} must be a whole number, 1 or more.")
    memory = _memory() if memory is None else memory
    most = max(1, memory // RANK_BYTES)
    if nproc > most:
        raise LaunchError(
            f"nproc={nproc}: a rank is a process of at least {RANK_BYTES >> 20} MiB, and this "
            f"machine has {memory / 2**30:.1f} GiB of memory, which holds {most} at most. Lower "
            "nproc, or use more machines."
        )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
