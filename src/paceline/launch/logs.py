"""Where the output of ranks goes: a log per rank, and rank 0's on the console as it comes."""

from __future__ import annotations

import codecs
import contextlib
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.05
_CHUNK = 1 << 16


def attempt_folder(log_dir: Path, attempt: int) -> Path:
    """The folder with the logs of the ``attempt``-th start of the ranks, counted from 0."""
    return log_dir if attempt == 0 else log_dir / f"attempt{attempt}"


def next_attempt(log_dir: Path) -> int:
    """The first attempt that has left no log yet: a resumed run must not overwrite earlier logs."""
    attempt = 0
    while any(attempt_folder(log_dir, attempt).glob("rank*.log")):
        attempt += 1
    return attempt


def node_folder(node: int, host: str) -> str:
    """The name of the folder with the logs of a node; of its host's name, what a file may have."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", host)[:100].lstrip(".") or "unnamed"
    return f"node{node}-{plain}"


@dataclass(frozen=True)
class LogName:
    """Which log: of what rank, started the how-manieth time, as which node.

    Numbers alone, so that a message about a log cannot name any other file.
    """

    node: int
    rank: int
    attempt: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.node < 10**6 and 0 <= self.rank < 10**7 and 0 <= self.attempt < 10**6):
            raise ValueError(f"no such log: {self}")

    def path(self, log_dir: Path, host: str) -> Path:
        """Where it lies, or its copy does, under ``log_dir``; ``host`` is the machine it is of."""
        folder = attempt_folder(log_dir / node_folder(self.node, host), self.attempt)
        return folder / f"rank{self.rank}.log"

    @staticmethod
    def of(path: Path, log_dir: Path, host: str) -> LogName | None:
        """The name of the log at ``path``; ``None`` where that is no log of a rank of ``host``."""
        found = _LOG_PATH.fullmatch(path.relative_to(log_dir).as_posix())
        if found is None:
            return None
        name = LogName(int(found["node"]), int(found["rank"]), int(found["attempt"] or 0))
        return name if name.path(log_dir, host) == path else None


_LOG_PATH = re.compile(
    r"node(?P<node>\d{1,6})-[^/]+/(attempt(?P<attempt>\d{1,6})/)?rank(?P<rank>\d{1,7})\.log"
)


class RankLogs:
    """The files of the ranks of one node: a log for both streams of each; error files out of sight.

    Every start of the ranks (``begin``) is an attempt with files of its own.
    """

    def __init__(
        self, log_dir: Path, scratch: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._say = say
        self._root = log_dir
        self._folder = log_dir
        self._scratch = scratch
        self._starts = 0
        self.attempt = -1

    def begin(self, ranks: Iterable[int], *, node: str = "") -> None:
        """Make the files of a new attempt; those of ``node`` lie in a folder of that name."""
        self._starts += 1
        self.scratch.mkdir(parents=True)
        ranks = list(ranks)
        log_dir = self._root / node
        try:
            self.attempt = next_attempt(log_dir)
            self._make_logs(attempt_folder(log_dir, self.attempt), ranks)
        except OSError as error:
            # Ranks that are started again because of a failure can do without a log.
            if self._starts == 1:
                raise
            self._say(f"no logs can be made in {log_dir} ({error.strerror}): this start has none.")
            self._make_logs(self.scratch, ranks)

    def _make_logs(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            self.log(rank).touch()

    @property
    def scratch(self) -> Path:
        """A folder for this attempt's other files, gone when the launch is."""
        return self._scratch / f"start{self._starts}"

    def log(self, rank: int) -> Path:
        """The log of a rank."""
        return self._folder / f"rank{rank}.log"

    def error_file(self, rank: int) -> Path:
        """The file in which a rank reports the error that ends it."""
        return self.scratch / f"rank{rank}.json"

    def quiet_point(self, rank: int) -> Path:
        """The file in which a rank notes how much of its output is for the console."""
        return Path(f"{self.error_file(rank)}.quiet")


class Relay:
    """Passes a growing log on to ``show`` as it is written, in a thread.

    Stops at the quiet point if the rank writes one (a file that holds an offset): what follows is
    a traceback that the launcher shows itself.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, log: Path, quiet_point: Path) -> None:
        """Start passing on ``log``; the one followed before is passed on to its end first."""
        self.finish()
        self._ended.clear()
        self._thread = threading.Thread(
            target=self._pass_on, args=(log, quiet_point), name="paceline-relay", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Pass on what is left and stop."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _pass_on(self, log: Path, quiet_point: Path) -> None:
        with contextlib.suppress(OSError):  # a log that is gone, or a disk that fails
            self._read(log, quiet_point)

    def _read(self, log: Path, quiet_point: Path) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        sent = 0
        with open(log, "rb", buffering=0) as file:
            while True:
                ended = self._ended.is_set()  # before the read: nothing comes after it
                chunk = file.read(_CHUNK)
                if not chunk:
                    if ended:
                        return
                    self._ended.wait(_POLL_SECONDS)
                    continue
                # The quiet point is written before what it silences, so a chunk that holds any
                # of that is read after the point can be seen.
                limit = _read_offset(quiet_point)
                if limit is not None:
                    chunk = chunk[: max(0, limit - sent)]
                sent += len(chunk)
                if chunk:
                    try:
                        self._show(decoder.decode(chunk))
                    except (OSError, ValueError, AttributeError):
                        # The console is gone (closed pipe, hung-up terminal): the run is not.
                        return


def _read_offset(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
