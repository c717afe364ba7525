"""Run folders: what a launch leaves on disk, and where in it things lie:

runs/demo-20250131-142501/
    config.yaml      the resolved config; config-1.yaml, …: earlier ones that a resume changed
    events.jsonl     what happened, one JSON record a line
    logs/            output by rank
    checkpoints/     saved state
    submission/      what was handed to the engine of a cluster (``paceline.launch.engines``)
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import glob
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from paceline.errors import ConfigError, LaunchError
from paceline.events import FILE_NAME
from paceline.untrusted import (
    MOST_CONFIG_BYTES,
    NotReadable,
    open_file,
    open_to_append,
    read_bytes,
    write_private,
)

SUBMISSION = "submission"
"""What is handed to an engine of a cluster lies here, before the run itself begins."""
_MARK = ".seen-"
_CONFIG_PART = ".config.yaml.part"
_MARK_SECONDS = 2.0
_LOCK_SECONDS = 2.0
_LONGEST_HOLDER = 200


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.path / FILE_NAME

    @property
    def logs(self) -> Path:
        """The folder of the ranks' logs."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def is_begun(self) -> bool:
        """Whether there is a run to go on with: its config is the first that is written."""
        return os.path.isfile(self.config)

    @property
    def was_used(self) -> bool:
        """Whether a launcher was here; a project's own folder may have a config.yaml as well."""
        traces = (self.path / ".lock", self.events, self.logs, self.checkpoints)
        return os.path.isfile(self.config) and any(map(os.path.exists, traces))

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's files."""
        return self.path / "tensorboard"

    def has_config(self, text: str) -> bool:
        """Whether ``text`` is the config that the run has now."""
        try:
            return read_bytes(self.config, MOST_CONFIG_BYTES) == text.encode()
        except OSError:
            return False

    def save_config(self, text: str) -> None:
        """Write the config; an earlier one that differs is kept beside it under a number.

        At every instant ``config.yaml`` is the old or the new one. Raises ``LaunchError`` where
        the disk refuses, and has then changed nothing.
        """
        part = self.path / _CONFIG_PART
        try:
            if self.has_config(text):
                return
            exists = self.config.exists()
            earlier = read_bytes(self.config, MOST_CONFIG_BYTES) if exists else None
            write_private(part, text.encode())
            if earlier is not None:
                self._keep_earlier(earlier)
            part.replace(self.config)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise _cannot_write(self.config, error) from error

    def _keep_earlier(self, data: bytes) -> None:
        number = 1
        while (kept := self.path / f"config-{number}.yaml").exists():
            with contextlib.suppress(NotReadable):  # no config of ours: the number is taken
                if read_bytes(kept, MOST_CONFIG_BYTES) == data:
                    return  # by a launcher that died before it had written the new one
            number += 1
        try:
            write_private(kept, data)
        except OSError:
            kept.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def in_use(self, identity: str | None = None) -> Iterator[None]:
        """Hold the folder for this process; a second one that tries gets a ConfigError.

        With an ``identity``, for the launchers of that run: each of them may hold it. The hold
        ends with the process, however that ends.
        """
        try:
            descriptor = open_to_append(self.path / ".lock")
        except OSError as error:
            raise _cannot_write(self.path / ".lock", error) from error
        with os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace") as file:
            try:
                holder = _hold(file, identity)
            except OSError as error:
                # Some network file systems know no locks. Two launchers on one folder is a rare
                # mistake, no reason to refuse such a disk.
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                    raise _cannot_write(self.path / ".lock", error) from error
                holder = None
            if holder is not None:
                raise ConfigError(
                    f"run folder {str(self.path)!r} is in use by process {holder}: its run is "
                    "still going on. Wait for it to end, or stop it."
                )
            yield

    def mark(self, identity: str, places: Iterable[str | os.PathLike[str]] = ()) -> None:
        """Leave a mark in the folder, and in ``places``, by which other machines know them.

        Whoever holds the run does this once: marks of earlier launches, killed before they could
        take them away, go.
        """
        for folder in (self.path, *map(Path, places)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for earlier in folder.glob(f"{_MARK}*"):
                    earlier.unlink(missing_ok=True)
                _mark_in(folder, identity).touch()
            except OSError as error:
                raise _cannot_make(folder, error.strerror or str(error)) from error

    def unmark(self, identity: str, places: Iterable[str | os.PathLike[str]] = ()) -> None:
        """Take the marks away again."""
        for folder in (self.path, *map(Path, places)):
            with contextlib.suppress(OSError):
                _mark_in(folder, identity).unlink(missing_ok=True)

    def __str__(self) -> str:
        return str(self.path)


def has_mark(folder: str | os.PathLike[str], identity: str) -> bool:
    """Whether ``folder`` is the one that another machine marked, so that both share it.

    A network file system may need a moment to show what another machine has just written.
    """
    deadline = time.monotonic() + _MARK_SECONDS
    while True:
        with contextlib.suppress(OSError), open_file(_mark_in(folder, identity)):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _mark_in(folder: str | os.PathLike[str], identity: str) -> Path:
    name = f"{_MARK}{identity}"
    if os.path.basename(name) != name or "\0" in name:
        raise ValueError(f"no identity of a run: {identity!r}")
    return Path(folder) / name


def _hold(file: TextIO, identity: str | None) -> str | None:
    """Lock the file for this process, or for its run; returns who has it if that is another."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        if _lock(file, fcntl.LOCK_EX):
            file.truncate(0)
            # On the descriptor: text that a full disk refuses is not tried again at the close. It
            # is for a person to read; what holds the folder is the lock.
            with contextlib.suppress(OSError):
                os.write(file.fileno(), f"{os.getpid()} {identity or ''}".rstrip().encode())
            if identity is not None:
                fcntl.flock(file, fcntl.LOCK_SH)
            return None
        file.seek(0)
        holder, _, holders_run = file.read(_LONGEST_HOLDER).strip().partition(" ")
        if identity is None:
            return holder
        if _lock(file, fcntl.LOCK_SH):
            if holders_run == identity:
                return None
            fcntl.flock(file, fcntl.LOCK_UN)
        # Whoever has it alone may be a launcher of this run, about to share it.
        if time.monotonic() > deadline:
            return holder
        time.sleep(0.05)


def _lock(file: IO[Any], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder_of(folder: str | os.PathLike[str]) -> int | None:
    """The process of this machine that holds the run in ``folder``; ``None`` where none does."""
    try:
        with open_file(Path(folder) / ".lock") as file:
            if _lock(file, fcntl.LOCK_EX):
                return None
            text = file.read(_LONGEST_HOLDER).split()
            held = os.fstat(file.fileno())
    except OSError:
        return None
    pid = int(text[0]) if text and text[0].isdigit() else 0
    # The number is text that anybody may have written, on any machine: the process is asked.
    for link in glob.glob(f"/proc/{pid}/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(link), held):
                return pid
    return None


def new_run(root: str | os.PathLike[str], name: str) -> RunFolder:
    """Make ``root/<name>-<date>-<time>``; an existing folder is never taken, not even in a race."""
    check_name(Path(root) / name)
    return new_run_like(stamped(root, name))


def stamped(root: str | os.PathLike[str], name: str) -> Path:
    """``root/<name>-<date>-<time>``."""
    return Path(root) / f"{name}-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}"


def new_run_like(folder: str | os.PathLike[str]) -> RunFolder:
    """Make ``folder``, or where it exists ``folder-2``, ``folder-3`` and so on."""
    check_name(folder)
    number = 1
    while True:
        suffix = "" if number == 1 else f"-{number}"
        path = Path(f"{os.fspath(folder)}{suffix}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise _cannot_make(path, "a file is in the way") from None
            number += 1
        except OSError as error:
            raise _cannot_make(path, error.strerror or str(error)) from error
        else:
            return RunFolder(path)


def new_run_at(path: str | os.PathLike[str]) -> RunFolder:
    """Make the run folder ``path``, which must not exist yet or be an empty folder."""
    check_name(path)
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = any(item.name != SUBMISSION for item in path.iterdir())
    except FileExistsError:
        raise _cannot_make(path, "a file is in the way") from None
    except OSError as error:
        raise _cannot_make(path, error.strerror or str(error)) from error
    run = RunFolder(path)
    if taken:
        go_on = f" Go on with the run in it: paceline train --resume {path}; or name"
        raise ConfigError(
            f"run folder {str(path)!r} is not empty, and a run never writes over what is there."
            + (f"{go_on} a new folder." if run.config.exists() else " Name a new folder.")
        )
    return run


def run_at(path: str | os.PathLike[str]) -> RunFolder:
    """The run folder ``path``, new or as an earlier launch left it; for ``--resume auto``.

    It may be one whose launcher was killed before it had written a config. A folder that holds
    anything else is refused.
    """
    check_name(path)
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = os.listdir(path)
        run = RunFolder(path)
        begun = not names or run.is_begun
        if not begun and run.events.exists():
            raise ConfigError(_of_a_trainer(run))
        places = (path, run.checkpoints) if run.checkpoints.name in names else (path,)
        strange = [name for place in places for name in os.listdir(place) if not _is_trace(name)]
    except FileExistsError:
        raise _cannot_make(path, "a file is in the way") from None
    except OSError as error:
        raise _cannot_make(path, error.strerror or str(error)) from error
    if not begun and strange:
        raise ConfigError(
            f"run folder {str(path)!r} is not empty, and no run is in it: it holds "
            f"{', '.join(map(repr, sorted(strange)[:3]))}. Name a new folder."
        )
    return run


def _is_trace(name: str) -> bool:
    """Whether a launcher that was killed early leaves this in a folder."""
    traces = (".lock", _CONFIG_PART, "logs", "checkpoints", SUBMISSION)
    return name in traces or name.startswith(_MARK)


def open_run(path: str | os.PathLike[str]) -> RunFolder:
    """The run folder ``path``, which must hold a run."""
    check_name(path)
    run = RunFolder(Path(path))
    if os.path.isfile(run.config):
        return run
    try:
        is_folder = stat.S_ISDIR(os.stat(run.path).st_mode)
    except FileNotFoundError:
        problem = f"run folder {str(path)!r} does not exist."
    except OSError as error:
        problem = f"run folder {str(path)!r} cannot be read: {error.strerror}."
    else:
        if not is_folder:
            problem = f"run folder {str(path)!r} is a file."
        elif os.path.exists(run.events) or os.path.exists(run.checkpoints):
            raise ConfigError(_of_a_trainer(run))
        else:
            problem = f"folder {str(path)!r} is not a run folder: it has no config.yaml."
    # The path may be that of a folder of runs; or lie in one, or beside one.
    folders = (run.path, run.path.parent, run.path.parent / "runs")
    nearby = next((found for folder in folders if (found := latest_run(folder))), None)
    hint = f" The latest run nearby is {nearby}." if nearby else ""
    raise ConfigError(problem + hint)


def list_runs(root: str | os.PathLike[str]) -> list[RunFolder]:
    """The run folders in ``root``, latest first."""
    try:
        found = [Path(root) / name for name in os.listdir(root)]
    except OSError:
        return []
    runs = [run for path in found if (run := RunFolder(path)).was_used]
    return sorted(runs, key=lambda r: (r.config.stat().st_mtime_ns, r.path.name), reverse=True)


def latest_run(root: str | os.PathLike[str]) -> RunFolder | None:
    """The latest run in ``root``, ``None`` when there is none."""
    return next(iter(list_runs(root)), None)


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuse a name that is no name of a folder, or that no terminal could show."""
    name = str(path)
    if not name.strip():
        raise ConfigError(
            f"run folder {name!r}: the name is empty. Name a folder, or leave it out for one "
            "under 'runs'."
        )
    if not name.isprintable():
        raise ConfigError(
            f"run folder {name!r} has characters in its name that cannot be shown. Choose "
            "another name."
        )


def _of_a_trainer(run: RunFolder) -> str:
    return (
        f"run folder {str(run.path)!r} was made by a paceline.Trainer (or a script), so that it "
        "has no config to go on with. Go on from the program that made it: fit(..., resume=True) "
        f"with run_dir={str(run.path)!r}."
    )


def _cannot_make(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"run folder {str(path)!r} cannot be made: {why}. Choose another with --run-dir."
    )


def _cannot_write(file: Path, error: OSError) -> LaunchError:
    return LaunchError(
        f"{str(file)!r} cannot be written: {error.strerror or error}. Make room or make the "
        "folder writable, or choose another with --run-dir."
    )
