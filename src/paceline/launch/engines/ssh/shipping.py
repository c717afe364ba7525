"""What is copied to hosts that do not see this machine's folders: which files, and in what form."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.config.code import with_code
from paceline.errors import ConfigError
from paceline.formatting import binary_size
from paceline.launch.engines.base import ClusterJob
from paceline.launch.engines.ssh.session import RemoteSession

LEFT_OUT = frozenset(
    {
        *(".git", ".hg", ".svn", ".venv", "venv", "env", ".tox", ".nox", "node_modules"),
        *("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints"),
        *("runs", "checkpoints", "wandb", "mlruns"),
    }
)
"""Folders that are never copied, wherever they are."""
_MOST_FILES = 100_000
_SHIP_SECONDS = 3600.0


@dataclass(frozen=True)
class CodeFolders:
    """The folders that a run needs of this machine, and where a host finds them."""

    folders: tuple[Path, ...]
    work: Path
    """Where relative names count from."""

    def on_host(self, path: str | os.PathLike[str], root: str) -> str | None:
        """Where ``path`` lies on a host that has the copy in ``root``; ``None``: not in it."""
        for number, folder in enumerate(self.folders):
            with contextlib.suppress(ValueError):
                inside = Path(os.path.abspath(path)).relative_to(folder)
                return os.path.normpath(os.path.join(root, _name(number, folder), inside))
        return None


@dataclass
class Archive:
    """A copy of the folders, packed. Named by its content: the same code is sent once."""

    file: IO[bytes]
    digest: str
    files: int
    size: int
    packed: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, session: RemoteSession, target: str, folder: str) -> None:
        """Have a host unpack it as ``target``, beside which ``folder`` is; once is enough."""
        request = {"do": "receive", "target": target, "into": folder}
        if session.ask({**request, "do": "has"})["has"]:
            return
        with self.lock:
            self.file.seek(0)
            session.tell({**request, "bytes": self.packed}, self.file)
        session.answer(_SHIP_SECONDS)

    def __str__(self) -> str:
        return f"{self.files} files, {binary_size(self.size)}, packed {binary_size(self.packed)}"


def folders_of(job: ClusterJob) -> CodeFolders:
    """The folder of the config or script, those of the config's own modules, the current one.

    The current folder is left out where it is a home or the root: then it is no project's.
    """
    what = _source_of(job)
    wanted = [] if what is None else [Path(what).parent]
    if "--script" not in job.train:
        wanted += map(Path, with_code(job.config).code or [])
    if job.folder not in (Path.home(), Path("/")) or not wanted:
        wanted.append(job.folder)
    wanted = [Path(os.path.abspath(folder)) for folder in wanted]
    outer = [one for one in wanted if not any(other in one.parents for other in wanted)]
    folders = tuple(dict.fromkeys(outer))
    inside = any(job.folder == one or one in job.folder.parents for one in folders)
    return CodeFolders(folders, job.folder if inside else folders[0])


def relocated(job: ClusterJob, code: CodeFolders, root: str) -> list[str]:
    """The arguments of ``paceline train`` with the config's or script's path on the host."""
    source = _source_of(job)
    place = None if source is None else code.on_host(source, root)
    number = 1 if job.train[:1] == ("--script",) else 0
    if place is None:
        return list(job.train)
    return [place if i == number else word for i, word in enumerate(job.train)]


def pack(code: CodeFolders, most_mib: int) -> Archive:
    """Pack the folders, into a file that is gone when it is closed."""
    listed = [(folder, file) for folder in code.folders for file in _files(folder)]
    size = sum((folder / file).lstat().st_size for folder, file in listed)
    if len(listed) > _MOST_FILES or size > most_mib << 20:
        raise ConfigError(_too_much(code, listed, size, most_mib))
    names = {folder: _name(number, folder) for number, folder in enumerate(code.folders)}
    digest = hashlib.sha256()
    target = tempfile.TemporaryFile(prefix="paceline-")  # noqa: SIM115 (handed on)
    with (
        gzip.GzipFile(fileobj=target, mode="wb", compresslevel=3, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for folder in code.folders:
            archive.addfile(_folder(names[folder]))
        for folder, file in listed:
            _add(archive, digest, folder / file, f"{names[folder]}/{file}")
    packed_size = target.tell()
    target.seek(0)
    return Archive(target, digest.hexdigest()[:16], len(listed), size, packed_size)


def _add(archive: tarfile.TarFile, digest: hashlib._Hash, path: Path, name: str) -> None:
    info = archive.gettarinfo(path, name)
    # Whose it is and when it was changed is no part of what it is.
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    digest.update(repr((name, info.size, info.mode & 0o111, info.linkname)).encode())
    if not info.isreg():
        archive.addfile(info)
        return
    with open(path, "rb") as file:
        content = file.read()
        info.size = len(content)
        digest.update(hashlib.sha256(content).digest())
        file.seek(0)
        archive.addfile(info, file)


def _folder(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o700
    return info


def _name(number: int, folder: Path) -> str:
    return f"{number}-{folder.name}" if folder.name else str(number)


def _source_of(job: ClusterJob) -> str | None:
    """The file of the config or the script."""
    if job.train[:1] == ("--script",):
        return job.train[1]
    return job.train[0] if job.train and not job.train[0].startswith("--") else None


def _files(folder: Path) -> list[str]:
    """The files in ``folder`` that are copied, in order: what git would keep, where it knows."""
    found = _files_of_git(folder)
    files = _walk(folder) if found is None else iter(found)
    kept = []
    for file in files:
        parts = Path(file).parts
        if LEFT_OUT.intersection(parts) or file.endswith(".pyc"):
            continue
        mode = _mode(folder / file)
        if stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and _stays_in(folder, folder / file)):
            kept.append(file)
        if len(kept) > _MOST_FILES:
            break
    return sorted(kept)


def _files_of_git(folder: Path) -> list[str] | None:
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run([*command, "--exclude-standard"], capture_output=True)
    if done.returncode != 0:
        return None  # no work tree
    return list(dict.fromkeys(os.fsdecode(name) for name in done.stdout.split(b"\0") if name))


def _walk(folder: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in files:
            yield os.path.relpath(os.path.join(place, name), folder)


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:  # listed by git, and removed
        return 0


def _stays_in(folder: Path, link: Path) -> bool:
    """Whether a link leads to something that is copied as well."""
    target = os.readlink(link)
    where = os.path.normpath(link.parent / target)
    return not os.path.isabs(target) and Path(where).is_relative_to(folder)


def _too_much(code: CodeFolders, listed: list[tuple[Path, str]], size: int, most_mib: int) -> str:
    parts: dict[str, int] = {}
    for folder, file in listed:
        place = str(folder / Path(file).parts[0])
        parts[place] = parts.get(place, 0) + (folder / file).lstat().st_size
    large = sorted(parts, key=lambda place: -parts[place])[:3]
    named = ", ".join(f"{place} ({binary_size(parts[place])})" for place in large)
    return (
        f"{len(listed)} files of {binary_size(size)} in {', '.join(map(str, code.folders))} would "
        f"be copied to every host; at most {most_mib} MiB and {_MOST_FILES:,} files are. Most of "
        f"it is {named}. Put data elsewhere or into .gitignore, start in the project's own folder, "
        "or set launch.ssh.most_mib; a folder that the hosts share is not copied"
    )
