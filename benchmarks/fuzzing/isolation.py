"""A place where hostile input can do no harm: one folder to write in, no process to be seen.

What is tried may be broken in ways nobody thought of. So a case gets namespaces of its own before
anything hostile is made: every file system is read-only there except for the folder of the fuzzer,
and the only processes are its own. Whoever is not root gets them in a user namespace.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_NEWNS, _NEWUSER, _NEWPID = 0x00020000, 0x10000000, 0x20000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_NOATIME, _NODIRATIME, _REC, _PRIVATE, _RELATIME = 1024, 2048, 16384, 1 << 18, 1 << 21
_FLAGS = {
    "nosuid": _NOSUID, "nodev": _NODEV, "noexec": _NOEXEC, "noatime": _NOATIME,
    "nodiratime": _NODIRATIME, "relatime": _RELATIME,
}  # fmt: skip
_PDEATHSIG, _SIGKILL = 1, 9

_libc = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str | None:
    """Why cases cannot be shut in here; ``None`` where they can."""
    pid = os.fork()
    if pid == 0:
        try:
            leave_the_machine()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if status == 0 else f"no namespaces of one's own: {os.strerror(status)}"


def leave_the_machine() -> None:
    """New namespaces for this process's children (processes) and for itself (mounts)."""
    user, group = os.getuid(), os.getgid()
    if user != 0:
        _call(_libc.unshare(_NEWUSER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call(_libc.unshare(_NEWNS | _NEWPID))


def shut_in(folder: Path) -> None:
    """In the first process of the new namespace: only ``folder`` stays writable, or this raises."""
    _call(_libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0))
    _mount(None, "/", _REC | _PRIVATE)
    _mount(str(folder), str(folder), _BIND)
    _call(_libc.mount(b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        place = fields[4].encode().decode("unicode_escape")
        if place == str(folder):
            continue
        flags = sum(_FLAGS.get(option, 0) for option in fields[5].split(","))
        try:
            _mount(None, place, _REMOUNT | _BIND | _RDONLY | flags)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT, errno.EACCES):  # below another mount
                raise
    for place in ("/", "/dev", "/dev/shm", "/tmp", str(Path.home()), str(Path.cwd())):
        _check_read_only(place)
    os.chdir(folder)


def drop_rights() -> None:
    """Root without capabilities: as other users, it cannot read a file without rights."""
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call(_libc.capset(version_3, (ctypes.c_uint32 * 6)()))


def _check_read_only(place: str) -> None:
    probe = os.path.join(place, f".fuzz-probe-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENOENT):
            return
        raise
    os.unlink(probe)
    raise OSError(errno.EPERM, f"{place} can still be written")


def _mount(source: str | None, target: str, flags: int) -> None:
    name = None if source is None else os.fsencode(source)
    _call(_libc.mount(name, os.fsencode(target), None, flags, None), target)


def _call(result: int, what: str = "") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what or None)
