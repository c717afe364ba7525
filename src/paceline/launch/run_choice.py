"""Which folder a launcher was asked to use, and which folders of others it therefore accepts."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.launch.run_folder import (
    RunFolder,
    new_run,
    new_run_at,
    new_run_like,
    open_run,
    run_at,
    stamped,
)
from paceline.launch.run_pattern import could_be, expand, is_pattern

_STAMP = r"-[0-9]{8}-[0-9]{6}(-[0-9]{1,6})?"
"""What ``new_run`` puts behind the name of a run."""


@dataclass(frozen=True)
class RunChoice:
    """Which folder a launcher was asked to use.

    That of a run to ``resume``; else ``run_dir``, which may be a pattern (``run_pattern.py``); else
    a new one, ``root/<name>-<date>-<time>``. With ``auto``, ``run_dir`` may hold the run already.
    """

    resume: str | None = None
    run_dir: str | None = None
    root: str | os.PathLike[str] = "runs"
    name: str = "run"
    auto: bool = False

    def make(self) -> RunFolder:
        """The folder, which is new unless the run is resumed."""
        if self.auto and self.run_dir is not None:
            return run_at(self.run_dir)
        if self.resume is not None:
            return open_run(self.resume)
        if self.run_dir is not None and is_pattern(self.run_dir):
            return new_run_like(expand(self.run_dir, self.name))
        if self.run_dir is not None:
            return new_run_at(self.run_dir)
        return new_run(self.root, self.name)

    def name_it(self) -> Path:
        """A folder that ``make`` could make now; nothing is made."""
        if self.run_dir is not None:
            return Path(expand(self.run_dir, self.name))
        return stamped(self.root, self.name)

    def goes_on(self, run: RunFolder) -> bool:
        """Whether the run in the folder that was made is to go on. Ask while it is held."""
        return self.resume is not None or (self.auto and run.is_begun)

    def take(self, path: str) -> RunFolder:
        """The folder ``path`` that another launcher reports, if we could have made it as well.

        Whoever reaches the rendezvous can write such a message, so it only chooses among
        the folders that this launcher was asked to use: the one that was named, or one of that
        name and any time. Raises ``ConfigError`` for every other.
        """
        named = self.run_dir if self.resume is None else self.resume
        if self.resume is None and named is not None and is_pattern(named):
            if not could_be(named, self.name, path):
                raise ConfigError(
                    f"--run-dir {named}: the machines that meet here work on {path}, which is no "
                    "folder of that pattern. Start all of them with the same command."
                )
            _check_owner(Path(path))
            return RunFolder(Path(path))
        if named is not None:
            if os.path.abspath(named) != path:
                flag = "--run-dir" if self.resume is None else "--resume"
                raise ConfigError(
                    f"{flag} {named}: the machines that meet here work on {path}. Start all of "
                    "them with the same command."
                )
            return RunFolder(Path(path))
        stem = os.path.abspath(Path(self.root) / self.name)
        if not re.fullmatch(re.escape(stem) + _STAMP, path):
            raise ConfigError(
                f"the machines that meet here work on {path!r}, but this one was asked for a "
                f"folder {stem}-<date>-<time>. Start all of them with the same command in the same "
                "folder, or name one for all with an absolute track.run_dir or --run-dir."
            )
        _check_owner(Path(path))
        return RunFolder(Path(path))


def _check_owner(path: Path) -> None:
    """Refuse a folder that somebody put where ours are, to have us write where he likes.

    The owner of the folder around it is trusted: he could exchange ours at any time.
    """
    try:
        found, around = os.lstat(path), os.stat(path.parent)
    except OSError:
        return  # not there yet, or not for us to see: whoever makes it gets the error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"run folder {str(path)!r} cannot be made: a link or a file is in the way. Choose "
            "another with --run-dir."
        )
    if found.st_uid not in (os.geteuid(), around.st_uid):
        raise ConfigError(
            f"run folder {str(path)!r} belongs to another user (uid {found.st_uid}). Start the "
            "machines of a run as the same user."
        )
