"""The command line of mpirun, in the dialect of the MPI that is there."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.untrusted import printable

Dialect = Literal["openmpi", "hydra", "intel"]

_VERSION_SECONDS = 60.0
_HOST = "paceline.launch.engines.mpi_host"
_SAYS: dict[Dialect, str] = {
    "openmpi": r"Open ?MPI|OpenRTE|PRRTE",
    "intel": r"Intel\(R\) MPI",
    "hydra": r"HYDRA",
}
"""What ``mpirun --version`` prints, by which the dialect is known; the first that fits."""


@dataclass(frozen=True)
class Mpi:
    """An mpirun, and how it is spoken to."""

    program: str
    dialect: Dialect

    @property
    def leave(self) -> signal.Signals:
        """What mpirun passes on at once, for all hosts to save and leave.

        A SIGTERM to that of Open MPI comes a second later, and SIGKILL after another one. That of
        MPICH passes on SIGTERM, and dies of SIGUSR2.
        """
        return signal.SIGUSR2 if self.dialect == "openmpi" else signal.SIGTERM

    def words(
        self, hosts: Sequence[str], count: int, folder: str, variables: Sequence[str]
    ) -> list[str]:
        """Start one process on each of ``count`` hosts, in ``folder``.

        Without ``hosts``: on this machine, or on those that mpirun knows of itself. The processes
        get ``variables`` of this one's environment, and may use every core of their host.
        """
        if self.dialect == "openmpi":
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            named = ["-H", ",".join(f"{host}:1" for host in hosts)] if hosts else []
            placed = ["-np", str(count), "--map-by", "ppr:1:node", "--bind-to", "none"]
            passed = [word for name in variables for word in ("-x", name)]
            return [self.program, *root, *named, *placed, "--wdir", folder, *passed]
        named = ["-hosts", ",".join(hosts)] if hosts else []
        unpinned = ["-genv", "I_MPI_PIN", "0"] if self.dialect == "intel" else ["-bind-to", "none"]
        placed = ["-n", str(count), "-ppn", "1", *unpinned]
        return [self.program, "-genvall", *named, *placed, "-wdir", folder]


@functools.cache
def find_mpi(program: str) -> Mpi:
    """The mpirun of that name or path, and its dialect; ``ConfigError`` where it is none."""
    key = f"launch.mpi.mpirun={program!r}"
    if program.startswith("-") or not program.isprintable():
        raise ConfigError(f"{key}: is no name of a program")
    path = shutil.which(program)
    if path is None:
        raise ConfigError(
            f"{key}: there is no such program here. Install Open MPI, MPICH or Intel MPI, or load "
            "its module; or name the program with --set launch.mpi.mpirun=PATH"
        )
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key}: --version: {error}") from None
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    for dialect, pattern in _SAYS.items():
        if re.search(pattern, said):
            return Mpi(path, dialect)
    first = printable(said.strip().partition("\n")[0][:100])
    raise ConfigError(
        f"{key}: is not the mpirun of Open MPI, MPICH or Intel MPI (--version says {first!r}). "
        "Start one launcher on every host by it: paceline train … --nnodes N --rdzv HOST:PORT"
    )


def host_command(launcher: Sequence[str]) -> list[str]:
    """What mpirun starts on every host to have ``launcher`` run there.

    The launcher's words are one word of JSON: mpirun takes a lone ``:`` for the beginning of
    another program, wherever it stands.
    """
    python, *rest = launcher
    assert rest[:2] == ["-m", "paceline"]
    return [python or sys.executable, "-m", _HOST, json.dumps(rest[2:])]
