"""``paceline train`` in a job of SLURM: what the job around the command means for it."""

from __future__ import annotations

import contextlib
import sys

from paceline.cli.train_request import TrainRequest
from paceline.config import load
from paceline.errors import ConfigError
from paceline.launch.engines import LaunchEngine
from paceline.launch.engines.slurm_allocation import (
    SlurmAllocation,
    allocation_of,
    launchers_of_step,
)


def place_in_allocation(request: TrainRequest) -> LaunchEngine | None:
    """What starts the run on all nodes of the allocation; ``None`` where this launcher does.

    ``--on`` goes before the allocation. In a task of the user's ``srun``, the request gets the
    number of nodes and the place where their launchers meet.
    """
    given = {text.partition("=")[0].strip() for text in (*request.flags, *request.overrides)}
    if "launch.on" in given or request.engine() not in ("local", "slurm"):
        return None
    if "launch.rdzv" not in given:
        found = launchers_of_step(["paceline", *sys.argv[1:]])
        _check_nodes(request, found)
        for key, value in found.items():
            request.flags[f"{key}={value}"] = f"--{key.removeprefix('launch.')} {value}"
    allocation = allocation_of()
    if allocation is None or (allocation.nodes == 1 and allocation.on_node):
        return None
    nodes = _nnodes(request)
    if nodes is None:
        nodes = str(allocation.nodes)
        request.flags[f"launch.nnodes={nodes}"] = f"--nnodes {nodes}"
    if nodes != "1" and "launch.rdzv" not in given:
        request.flags[f"launch.rdzv={allocation.rdzv}"] = f"--rdzv {allocation.rdzv}"
    return SlurmAllocation(allocation)


def _check_nodes(request: TrainRequest, found: dict[str, str]) -> None:
    asked = _nnodes(request)
    if found and asked not in (None, found["launch.nnodes"]):
        raise ConfigError(
            f"launch.nnodes={asked}, but srun started a launcher on each of "
            f"{found['launch.nnodes']} nodes. Leave it out, or start as many."
        )


def _nnodes(request: TrainRequest) -> str | None:
    """The number of machines that the command line or the config names."""
    source = None if request.script is not None else next(iter(request.configs), None)
    with contextlib.suppress(ConfigError):  # said, with all other problems, where it is loaded
        config = load(source, [*request.flags, *request.overrides])
        if "nnodes" in config.launch.model_fields_set:
            return str(config.launch.nnodes)
    return None
