"""Where committed state is kept for the processes that come after this one.

When a rank is lost, the launcher starts all ranks again, so that what a process has in memory is
gone. The first rank of every machine therefore writes each commit into the run's folder there. The
newest one of all machines is what the next world goes on from.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.environment import RUN_DIR

_SUFFIX = ".commit"
_PART = ".part"
"""Of a commit that is being written, or was when its process ended."""


@dataclass
class CommitFolder:
    """The commits of a run, as this machine sees them; the newest of every machine is kept."""

    path: Path
    writes: bool
    """Whether this process is the one of its machine that writes."""
    number: int = 0
    """That of the last commit."""

    @classmethod
    def of_run(cls, call: int) -> CommitFolder | None:
        """That of the run this process belongs to; ``None`` where no launcher of ours has one.

        ``call`` tells the loops of a script apart, which may have several, one after the other.
        """
        run = os.environ.get(RUN_DIR)
        if not run:
            return None
        return cls(Path(run) / "commits" / str(call), os.environ.get("LOCAL_RANK", "0") == "0")

    def newest(self) -> int:
        """The number of the newest commit that this process can read; 0 if there is none."""
        return max((number for number, _ in self._found()), default=0)

    def read(self, number: int) -> bytes:
        """The content of a commit."""
        place = next(place for found, place in self._found() if found == number)
        return place.read_bytes()

    def write(self, content: bytes) -> None:
        """Keep a commit, which is there as a whole or not at all; and drop this machine's last."""
        self.number += 1
        self.path.mkdir(parents=True, exist_ok=True)
        mine = f"-{platform.node()}{_SUFFIX}"
        place = self.path / f"{self.number:012d}{mine}"
        # Two machines of one name, such as containers, may share the folder: the same commit of
        # both is one file, which each of them writes as a whole.
        part = self.path / f"{place.name}.{os.getpid()}-{os.environ.get('RANK', '0')}{_PART}"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        part.replace(place)
        for old in list(self.path.iterdir()):
            is_mine = old.name.endswith(mine) or (mine in old.name and old.suffix == _PART)
            if is_mine and old.name < place.name:
                old.unlink(missing_ok=True)

    def _found(self) -> list[tuple[int, Path]]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for place in self.path.iterdir():
                number = place.name.partition("-")[0]
                # What another user has put there is not read: reading it would run it.
                if place.suffix == _SUFFIX and number.isdecimal() and _is_ours(place):
                    found.append((int(number), place))
        return found


def _is_ours(place: Path) -> bool:
    try:
        return place.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False
