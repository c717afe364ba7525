"""Gathering limits, memory and versions of this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
from pathlib import Path

from paceline.doctor.facts import StartedBy, SystemLimits
from paceline.errors import WorldError
from paceline.launch.allocation import check_not_left_alone
from paceline.launch.environment import read_environment

_CGROUP = Path("/sys/fs/cgroup")
_SHM = "/dev/shm"
_GIT_TIMEOUT_S = 5.0


def gather_limits() -> SystemLimits:
    """What the system lets processes of this user have here."""
    files, files_hard = (_finite(v) for v in resource.getrlimit(resource.RLIMIT_NOFILE))
    processes, used = _processes()
    shm_total, shm_free = _space(_SHM)
    total, free, group = _memory()
    return SystemLimits(
        cores=usable_cores(),
        threads=_number(os.environ.get("OMP_NUM_THREADS", "")),
        files=files,
        files_hard=files_hard,
        processes=processes,
        processes_used=used,
        locked_memory=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        shm_total=shm_total,
        shm_free=shm_free,
        memory_total=total,
        memory_free=free,
        memory_group=group,
    )


def gather_started_by() -> StartedBy:
    """Which launcher's variables are set here, and what a rank would make of them."""
    try:
        env = read_environment()
        if env is None:
            check_not_left_alone()
            return StartedBy()
    except WorldError as error:
        return StartedBy(problem=str(error))
    meet = "" if env.address is None else f", which meet at {env.address}:{env.port}"
    where = f"rank {env.rank} of {env.size}{meet}"
    return StartedBy(env.launcher, env.variables, where)


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def python_version() -> str:
    """Version of the interpreter that ranks will run on."""
    return platform.python_version()


def git_commit(folder: str) -> str:
    """The commit that ``folder`` is at, ``+`` after it with uncommitted changes; else empty."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if changed else commit


def _git(folder: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processes() -> tuple[int | None, int | None]:
    """How many processes and threads are allowed, and how many there are."""
    group, group_used = _cgroup_number("pids.max"), _cgroup_number("pids.current")
    limit = _finite(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if os.geteuid() == 0:
        limit = None  # the kernel does not hold root to it
    if limit is None or (group is not None and group < limit):
        return group, group_used
    return limit, _own_threads()


def _own_threads() -> int:
    """The threads of all processes of this user."""
    count, user = 0, os.geteuid()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if process.stat().st_uid == user:
                count += len(os.listdir(process / "task"))
    return count


def _memory() -> tuple[int | None, int | None, int | None]:
    """All memory, what is free for ranks, and the limit of the control group."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            sizes[name] = int(rest.split()[0]) * 1024
    total, free = sizes.get("MemTotal"), sizes.get("MemAvailable")
    group = _cgroup_number("memory.max", "memory/memory.limit_in_bytes")
    if group is None or (total is not None and group >= total):
        return total, free, None
    used = _cgroup_number("memory.current", "memory/memory.usage_in_bytes") or 0
    # Pages that files are cached in are given back when somebody needs them.
    used -= min(used, _cgroup_statistic("inactive_file"))
    left = max(group - used, 0)
    return total, left if free is None else min(free, left), group


def _cgroup_number(*names: str) -> int | None:
    """A limit or count of this process's control group (version 2, then 1); ``None``: no limit."""
    for folder in _cgroup_folders():
        for name in names:
            with contextlib.suppress(OSError):
                if (value := _number((folder / name).read_text())) is not None:
                    return value
    return None


def _cgroup_statistic(name: str) -> int:
    for folder in _cgroup_folders():
        for file in ("memory.stat", "memory/memory.stat"):
            with contextlib.suppress(OSError):
                for line in (folder / file).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == name:
                        return int(value)
    return 0


def _cgroup_folders() -> list[Path]:
    """The control group of this process, its parents, and the root: the nearest limit counts."""
    path = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                path = line[3:].strip("/")
    own = _CGROUP / path
    return [own, *(parent for parent in own.parents if _CGROUP in (parent, *parent.parents))]


def _space(folder: str) -> tuple[int | None, int | None]:
    """Total and free bytes of the file system that ``folder`` is on."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _finite(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None
