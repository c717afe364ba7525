"""What the logs of ranks say about their end: tracebacks, dumps, last words.

``evidence_in`` is a pure function over the text of a log; ``LogFolder`` finds the log of a
rank in a run folder, on whichever node and at whichever start it was written.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.untrusted import open_file

_READ_BYTES = 256 * 1024
_TAIL_LINES = 20
_MOST_LOGS = 100_000
_NAME = re.compile(r"rank([0-9]{1,9})\.log")

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Torch puts the rank before each line of an uncaught error.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_NOT_THE_USERS = ("site-packages", "dist-packages", str(Path(__file__).parents[2]))
# Lines by which native code and the system say why they end a process.
_LAST_WORDS = re.compile(
    r"terminate called|^\s*what\(\):|Fatal Python error|out of memory|OutOfMemory|oom-kill"
    r"|No space left on device|Disk quota exceeded|Bus error|bad_alloc|can't allocate memory"
    r"|Cannot allocate memory|Segmentation fault|DataLoader worker|Too many open files"
    r"|device-side assert|uncorrectable ECC|Watchdog caught|enforce fail at",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LogEvidence:
    """What a rank's log holds on why it ended. All but ``path`` may be empty."""

    path: str
    traceback: str = ""
    """The last Python traceback, with those that led to it."""
    dump: str = ""
    """The Python stacks that faulthandler wrote when native code crashed."""
    last_words: tuple[str, ...] = ()
    """Lines by which native code or the system give a reason."""
    tail: str = ""
    """The last lines, whatever they are."""

    @property
    def error(self) -> str:
        """The line of the traceback that names the exception."""
        lines = [line for line in self.traceback.splitlines() if line and not line[0].isspace()]
        named = [line for line in lines if line != _TRACEBACK and line not in _CHAINED]
        return named[-1] if named else ""

    @property
    def place(self) -> str:
        """The deepest line of the user's own code in the traceback, as ``file:line``."""
        frames = re.findall(r'^  File "([^"]+)", line (\d+)', self.traceback, re.MULTILINE)
        own = [(f, n) for f, n in frames if not any(part in f for part in _NOT_THE_USERS)]
        file, line = (own or frames or [("", "")])[-1]
        return f"{file}:{line}" if file else ""

    @property
    def shown(self) -> str:
        """The part of it that a person should read first."""
        return self.traceback or self.dump or "\n".join(self.last_words) or self.tail


class LogSource(Protocol):
    """Where the story of a run looks for a reason."""

    def of(self, attempt: int, rank: int, log: str = "") -> LogEvidence | None:
        """Of a rank at one start; ``log`` is where its launcher said it is."""

    def of_all(self, attempt: int) -> list[LogEvidence]:
        """Of every rank at one start."""


class NoLogs:
    """A run without logs."""

    def of(self, attempt: int, rank: int, log: str = "") -> LogEvidence | None:
        """Nothing."""
        return None

    def of_all(self, attempt: int) -> list[LogEvidence]:
        """Nothing."""
        return []


class LogFolder:
    """The logs in a run folder: ``logs/[node<k>-<host>/][attempt<n>/]rank<r>.log``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: list[Path] | None = None

    def of(self, attempt: int, rank: int, log: str = "") -> LogEvidence | None:
        """See ``LogSource``."""
        for path in (*self._told(log), *self._of_attempt(attempt, str(rank))):
            if path.is_file():
                return read_log(path)
        return None

    def of_all(self, attempt: int) -> list[LogEvidence]:
        """See ``LogSource``."""
        return [read_log(path) for path in self._of_attempt(attempt, "*")]

    def _told(self, log: str) -> list[Path]:
        """Where the launcher said it is; also after the run folder was moved or copied."""
        if not log:
            return []
        _, found, below = log.rpartition(f"/{self._folder.name}/")
        told = [self._folder / below, Path(log)] if found else [Path(log)]
        return [path for path in told if self._is_inside(path)]

    def _is_inside(self, path: Path) -> bool:
        """Whether it is a log of this run: a record that was received may name any file."""
        try:
            return path.resolve().is_relative_to(self._folder.resolve())
        except (OSError, ValueError, RuntimeError):  # a path that cannot be one, a ring of links
            return False

    def _of_attempt(self, attempt: int, rank: str) -> list[Path]:
        found = [path for path in self._all() if rank in ("*", str(_number(path)[0]))]
        return [path for path in found if self._attempt_of(path) == attempt]

    def _all(self) -> list[Path]:
        """Every log, found once: in a folder of a node, of a start, or both."""
        if self._found is None:
            patterns = ("rank*.log", "*/rank*.log", "*/*/rank*.log")
            found = itertools.chain(*(self._folder.glob(pattern) for pattern in patterns))
            logs = (path for path in found if _NAME.fullmatch(path.name) and self._is_inside(path))
            self._found = sorted(itertools.islice(logs, _MOST_LOGS), key=_number)
        return self._found

    def _attempt_of(self, path: Path) -> int:
        for part in path.relative_to(self._folder).parts:
            if match := re.fullmatch(r"attempt([0-9]{1,9})", part):
                return int(match[1])
        return 0


def read_log(path: Path) -> LogEvidence:
    """The evidence in one log; of a long one its end is read."""
    try:
        with open_file(path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _READ_BYTES))
            text = file.read(_READ_BYTES).decode(errors="replace")
    except OSError as error:
        return LogEvidence(str(path), tail=f"(cannot be read: {error.strerror or error})")
    return evidence_in(text, str(path))


def evidence_in(text: str, path: str = "") -> LogEvidence:
    """What the text of a log says about the end of its rank."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.rstrip().splitlines()]
    return LogEvidence(
        path=path,
        traceback=_last_traceback(lines),
        dump=_last_dump(lines),
        last_words=tuple(line.strip() for line in lines if _LAST_WORDS.search(line))[-5:],
        tail="\n".join(lines[-_TAIL_LINES:]),
    )


def _last_traceback(lines: list[str]) -> str:
    starts = [i for i, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return ""
    first = starts.pop()
    end = _end_of_traceback(lines, first)
    # What led to it stands before it, with a sentence and empty lines between.
    while starts and any(line.strip() in _CHAINED for line in lines[first - 3 : first]):
        first = starts.pop()
    return "\n".join(lines[first:end])


def _end_of_traceback(lines: list[str], start: int) -> int:
    """The line after the exception; frames are indented, the line that names it is not."""
    end = start + 1
    while end < len(lines) and (lines[end].startswith(" ") or not lines[end]):
        end += 1
    return min(end + 1, len(lines))


def _last_dump(lines: list[str]) -> str:
    starts = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not starts:
        return ""
    end = starts[-1] + 1
    while end < len(lines) and not lines[end].startswith("Extension modules"):
        end += 1
    return "\n".join(lines[starts[-1] : end]).rstrip()


def _number(path: Path) -> tuple[int, str]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]) if match else 0, str(path))
