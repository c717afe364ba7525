"""Starts the ranks of a measurement, here or on several machines, and brings their result home."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, LaunchError, RankFailed
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.launch.secret import RunSecret

_GRACE = 5.0
_TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(frozen=True)
class BenchPlacement:
    """How many ranks on how many machines, and where those meet."""

    nproc: int
    nnodes: int = 1
    rdzv: str | None = None
    wait: float = 60.0
    secret: RunSecret | None = None


def read_place(
    *,
    nproc: str | None,
    nnodes: str | None,
    rdzv: str | None,
    wait: float,
    device: str,
    secret: str | None = None,
) -> BenchPlacement:
    """What the command line says of the ranks, checked as ``paceline train`` checks it."""
    from paceline.config import load
    from paceline.config.checks import node_problems
    from paceline.config.devices import count_gpus
    from paceline.config.fields import node_range
    from paceline.config.resolving import nproc_of

    given = {"nproc": nproc, "nnodes": nnodes, "rdzv": rdzv, "secret": secret}
    flags = {f"launch.{k}={v}": f"--{k} {v}" for k, v in given.items() if v is not None}
    try:
        config = load(None, [*flags, f"launch.device={device}"])
    except ConfigError as error:
        raise ConfigError([_in_flags(problem, flags) for problem in error.problems]) from None
    problems = [text for _, text in node_problems(config)]
    least, most = node_range(config.launch.nnodes)
    if least != most:
        problems.append(
            f"--nnodes {nnodes}: a measurement needs to know all its machines; give one number"
        )
    if not wait > 0:
        problems.append(f"--wait {wait:g}: must be a number of seconds above 0")
    gpus = count_gpus()
    ranks = nproc_of(config, gpus)
    if device == "cuda" and gpus == 0:
        problems.append(
            "--device cuda: torch finds no GPU that it can use on this machine; give --device cpu"
        )
    elif device == "cuda" and ranks > gpus:
        problems.append(
            f"--device cuda: each rank needs a GPU of its own, and there are {ranks} ranks, but "
            f"this machine has {gpus} that torch can use; give --nproc {gpus}, or --device cpu"
        )
    elif ranks * most < 2:
        problems.append(
            f"{ranks} rank on {most} machine: it takes two to talk. Give --nproc 2 or more "
            "(without as many GPUs: --device cpu), or several machines with --nnodes and --rdzv"
        )
    if problems:
        raise ConfigError(problems)
    return BenchPlacement(ranks, most, config.launch.rdzv, wait, _secret_of(config))


def place_of(config: Config, wait: float) -> BenchPlacement:
    """Where the ranks of a resolved config are started, all of its machines being there."""
    from paceline.config.fields import node_range

    problems = []
    least, most = node_range(config.launch.nnodes)
    if least != most:
        problems.append(
            f"launch.nnodes={config.launch.nnodes}: a measurement needs to know all its machines; "
            f"give one number, like --nnodes {most}"
        )
    if not wait > 0:
        problems.append(f"--wait {wait:g}: must be a number of seconds above 0")
    if problems:
        raise ConfigError(problems)
    assert isinstance(config.launch.nproc, int)
    return BenchPlacement(config.launch.nproc, most, config.launch.rdzv, wait, _secret_of(config))


def _secret_of(config: Config) -> RunSecret | None:
    from paceline.launch.secret import find_secret

    return None if config.launch.rdzv is None else find_secret(config.launch.secret)


def measure(
    place: BenchPlacement,
    module: str,
    request: str,
    *,
    asked: Mapping[str, str],
    progress: Callable[[str], None],
    say: Callable[[str], None],
    so_far: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run ``python -m module REQUEST FILE`` on every rank; what the first one here wrote to FILE.

    Of several machines, each starts its own ranks by the same call, and gets the same result;
    ``asked`` are the options that must be the same on all of them. Where it does not
    come to its end, ``so_far`` gets what had been written until then.
    """
    from paceline.launch.job import LocalJob
    from paceline.launch.local import launch
    from paceline.launch.restart_policy import RestartLimits

    folder = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    file = folder / "result.json"
    keep = False
    try:
        with contextlib.ExitStack() as stack:
            more = {} if place.rdzv is None else _meet(place, asked, stack, say)
            launch(
                LocalJob(
                    command=["-m", module, request, str(file)],
                    nproc=place.nproc,
                    log_dir=folder / "logs",
                    limits=RestartLimits(max_restarts=0, max_preemptions=0),
                    grace=_GRACE,
                    output=progress,
                    notice=lambda text: None,  # about saving and restarts: nothing to do with us
                    **more,
                )
            )
        if not file.exists():
            raise LaunchError("the ranks left without a result (was one of them told to stop?).")
        return _read(file)
    except BaseException as error:
        keep = isinstance(error, RankFailed)  # its logs
        if so_far is not None and file.exists():
            so_far(_read(file))
        if isinstance(error, LaunchError) and not keep:
            raise LaunchError(_in_our_words(str(error))) from None
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _meet(
    place: BenchPlacement,
    asked: Mapping[str, str],
    stack: contextlib.ExitStack,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Meet the launchers of the other machines; what a ``LocalJob`` needs to know of them."""
    env = _quiet_torch()
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from paceline.config.endpoints import endpoints
    from paceline.launch.rendezvous.joining import RendezvousSettings, RunHooks
    from paceline.launch.rendezvous.membership import RunInfo
    from paceline.launch.rendezvous.multi_node import MultiNodeRendezvous
    from paceline.launch.secret import open_to_strangers

    assert place.rdzv is not None
    if (warning := open_to_strangers(endpoints(place.rdzv), place.secret)) is not None:
        say(f"warning: {warning}")
    rendezvous = MultiNodeRendezvous(
        RendezvousSettings(
            endpoints=endpoints(place.rdzv),
            min_nodes=place.nnodes,
            max_nodes=place.nnodes,
            rejoin_timeout=place.wait,
            nproc=place.nproc,
            asked={**asked, "paceline's version": __version__},
            secret=place.secret,
        ),
        # No run, no folder, no events: only ranks that meet.
        RunHooks(
            make=lambda: RunInfo("", uuid.uuid4().hex),
            take=lambda run: None,
            write=lambda event: None,
            keep_log=lambda name, host, data: None,
            notice=say,
        ),
    )
    stack.callback(rendezvous.shutdown)
    try:
        rendezvous.open()
    except RendezvousError as error:
        raise LaunchError(f"the machines could not meet: {error}") from None
    say(f"node {rendezvous.node} of {len(rendezvous.nodes)}: {', '.join(rendezvous.nodes)}")
    return {"rendezvous": lambda: rendezvous, "host": rendezvous.host, "env": env}


def _quiet_torch() -> Mapping[str, str]:
    """Keep torch's C++ from printing a stack for each lost connection; what ranks get instead."""
    if os.environ.get(_TORCH_LOG_LEVEL) is not None or "torch" in sys.modules:
        return {}
    os.environ[_TORCH_LOG_LEVEL] = "FATAL"
    return {_TORCH_LOG_LEVEL: "WARNING"}


def _in_our_words(text: str) -> str:
    """What the launcher says of a run and its config, said of a measurement and its options."""
    if "launch.max_preemptions" in text:
        return (
            "another machine was told to stop, and the measurement is over. Start it again on all "
            "of them."
        )
    return text.replace("launch.rejoin_timeout", "--wait")


def _in_flags(problem: str, flags: Mapping[str, str]) -> str:
    for override, flag in flags.items():
        problem = problem.replace(f"--set {override}", flag)
    return problem


def check_outputs(files: Sequence[tuple[str, str | None]]) -> list[str]:
    """What keeps results from being written to ``(option, file)``; found before any is measured."""
    problems = []
    for option, name in files:
        if name is None or name == "-":
            continue
        path = Path(name)
        folder = path.absolute().parent
        if not folder.is_dir():
            problems.append(f"{option} {name}: there is no folder {folder}; make it first")
        elif path.is_dir():
            problems.append(f"{option} {name}: is a folder; name a file in it")
    return problems
