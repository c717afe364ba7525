"""Gathering what a config asks of the machines, and what is wrong with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.checkpoint.storage.open import is_url
from paceline.config import Config, count_gpus, load, load_checked
from paceline.config.endpoints import Endpoint, endpoints
from paceline.config.fields import node_range
from paceline.config.overrides import in_users_words
from paceline.config.resolving import nproc_of, on_gpu, world_of
from paceline.doctor.facts import RunPlan
from paceline.doctor.facts_folders import Wanted
from paceline.doctor.facts_network import network_variables
from paceline.errors import ConfigError, LayoutError
from paceline.launch.secret import RunSecret, find_secret
from paceline.layout import Layout


@dataclass(frozen=True)
class Asked:
    """A config as the doctor needs it; ``config`` is ``None`` where it cannot be read."""

    plan: RunPlan
    config: Config | None
    hash: str
    folders: tuple[Wanted, ...]
    rdzv: tuple[Endpoint, ...]
    secret: RunSecret | None = None


def gather_config(
    source: str | None, overrides: Sequence[str], flags: Mapping[str, str] | None = None
) -> Asked:
    """Load and check the config at ``source``; its problems are facts, not errors.

    ``flags`` are further overrides, with the words of the command line that they come from.
    """
    flags = flags or {}
    overrides = [*flags, *overrides]
    problems: tuple[str, ...] = ()
    config: Config | None = None
    try:
        config = load_checked(source, overrides)
    except ConfigError as error:
        problems = tuple(in_users_words(error.problems, flags))
        with contextlib.suppress(ConfigError):
            config = load(source, overrides)
    if config is None:
        return Asked(RunPlan(source=source or "", problems=problems), None, "", (), ())
    secret: RunSecret | None = None
    if config.launch.rdzv is not None:
        secret = find_secret(config.launch.secret)
    return Asked(
        secret=secret,
        plan=_plan(source or "", problems, config),
        config=config,
        hash=_hash(config),
        folders=_folders(config),
        rdzv=_places(config),
    )


def _places(config: Config) -> tuple[Endpoint, ...]:
    try:
        return tuple(endpoints(config.launch.rdzv)) if config.launch.rdzv else ()
    except ValueError:  # one of the config's problems
        return ()


def _plan(source: str, problems: tuple[str, ...], config: Config) -> RunPlan:
    gpus = count_gpus()
    least, most = node_range(config.launch.nnodes)
    keep = config.checkpoint.keep + (config.checkpoint.keep_best if config.checkpoint.best else 0)
    nproc = nproc_of(config, gpus)
    return RunPlan(
        source=source,
        problems=problems,
        nproc=nproc,
        least_nodes=least,
        most_nodes=most,
        on_gpu=on_gpu(config, gpus),
        shares_gpu=config.launch.share_gpu,
        workers=config.data.workers,
        checkpoints_at_once=keep + 1,
        network_env=network_variables(config.launch.env),
        in_memory=config.checkpoint.memory_every is not None,
        copies_of_state=_copies_of_state(config, world_of(config, gpus)),
    )


def _copies_of_state(config: Config, ranks: int) -> float:
    """How much of the whole model's state a rank holds: less with zero, tp and pp."""
    try:
        layout = Layout.parse(config.layout, world_size=ranks)
    except LayoutError:
        return 1.0
    cut = layout.tp * layout.pp
    if layout.zero:
        cut *= max(1, layout.dp // max(1, layout.replicas))
    return 1.0 / cut


def _hash(config: Config) -> str:
    """Of the values alone: on each machine the file may lie somewhere else."""
    values = config.model_dump()
    # Machines may have different numbers of ranks, keep the secret elsewhere, and their modules.
    for key in ("nproc", "secret"):
        values["launch"].pop(key, None)
    values.pop("code", None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _folders(config: Config) -> tuple[Wanted, ...]:
    where = config.checkpoint.where
    folders = [_wanted("track.run_dir", config.track.run_dir, where is None)]
    if where is not None:
        folders.append(_wanted("checkpoint.where", where, True, config.checkpoint.storage))
    return tuple(folders)


def _wanted(
    key: str, where: str, holds_checkpoints: bool, options: dict[str, object] | None = None
) -> Wanted:
    if is_url(where):
        return Wanted(key, where, True, holds_checkpoints, dict(options or {}))
    folder = os.path.abspath(where.removeprefix("file://"))
    return Wanted(key, folder, False, holds_checkpoints)
