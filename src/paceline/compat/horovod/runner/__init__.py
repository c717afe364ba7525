"""Starting ranks in Horovod's words: ``horovod.run``, and ``horovodrun`` from Python."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from paceline.compat.horovod.runner.arguments import read_horovodrun
from paceline.errors import LaunchError
from paceline.launch.environment import RUN_DIR
from paceline.launch.local import call
from paceline.launch.restart_policy import RestartLimits

_HERE = ("localhost", "127.0.0.1")
_WITHOUT_NEED = (
    "slots",
    "cooldown_range",
    "start_timeout",
    "disable_cache",
    "output_filename",
    "verbose",
    "network_interface",
    "network_interfaces",
    "executable",
    "ssh_port",
    "ssh_identity_file",
    "host_discovery_script",
    "mpi_args",
)
"""Further arguments of Horovod's ``run``; the last two are refused where they are given."""


_HELP = """usage: python -m paceline.compat.horovod.runner.launch -np N [options] python SCRIPT

Runs what horovodrun would: its options are read, and the command of paceline train that does the
same is shown and run. paceline train --help lists the options of that."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    reset_limit: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    **others: Any,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks of this machine; what each returned.

    ``reset_limit`` is how often failed ranks are started again. Options that are about other
    machines, or about MPI, are refused: ``paceline.launch`` and ``paceline train --on`` start ranks
    there.
    """
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    _check_is_here(hosts, hostfile, others)
    ranks = num_proc if np is None else np
    with tempfile.TemporaryDirectory(prefix="paceline-run-") as folder:
        work = functools.partial(_on_rank, func, tuple(args), dict(kwargs or {}), folder)
        elastic = min_num_proc is not None or min_np is not None
        restarts = reset_limit if reset_limit is not None else 3 if elastic else 0
        call(work, nproc=ranks, limits=RestartLimits(restarts), env={RUN_DIR: folder})
        return [cloudpickle.loads(_place(folder, rank).read_bytes()) for rank in range(ranks)]


def _on_rank(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], folder: str
) -> None:
    from paceline.compat.horovod.alias import prepare_rank

    prepare_rank()
    value = func(*args, **kwargs)
    place = _place(folder, int(os.environ["RANK"]))
    place.write_bytes(cloudpickle.dumps(value))


def _place(folder: str, rank: int) -> Path:
    return Path(folder) / f"value.rank{rank}.pkl"


def _check_is_here(hosts: str | None, hostfile: str | None, others: dict[str, Any]) -> None:
    names = [host.partition(":")[0] for host in (hosts or "").split(",") if host]
    elsewhere = [name for name in names if name not in _HERE]
    for name in others:
        if name not in _WITHOUT_NEED:
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
    there = [name for name in ("host_discovery_script", "mpi_args") if others.get(name)]
    if elsewhere or hostfile is not None or there:
        asked = ", ".join([*elsewhere, *([hostfile] if hostfile else []), *there])
        raise LaunchError(
            f"horovod.run({asked}): a function is run on this machine alone. On other machines "
            "start it with paceline.launch(function, on='ssh', settings={'launch.ssh.hosts': "
            "[...]}), or a script with paceline train --on ssh --hosts ... --backend horovod."
        )


def run_commandline(args: Sequence[str] | None = None) -> None:
    """What ``horovodrun`` does: run a command line of it, or of this process, to its end."""
    given = list(sys.argv[1:] if args is None else args)
    if given[:1] in (["-h"], ["--help"]):
        print(_HELP)
        return
    command = read_horovodrun(given)
    if command.refused:
        raise SystemExit("\n".join(command.refused))
    for note in dict.fromkeys(command.notes):
        print(f"note: {note}", file=sys.stderr)
    script, *own = command.script
    ours = ["train", *command.arguments, "--script", script, *(["--", *own] if own else [])]
    print(f"running: {shlex.join(['paceline', *ours])}", file=sys.stderr, flush=True)
    ended = subprocess.run([sys.executable, "-m", "paceline", *ours], check=False)
    raise SystemExit(ended.returncode)
