"""From a config to what will run: ``auto`` made explicit, and the config as text."""

from __future__ import annotations

from typing import Any

import paceline.config.yaml_file as yaml_file
from paceline.config.devices import count_gpus
from paceline.config.fields import node_range
from paceline.config.lr_schedule import scaled_lr
from paceline.config.schema import Config
from paceline.layout import Layout

RANKS_WITHOUT_GPU = 2


def on_gpu(config: Config, gpus: int) -> bool:
    """Whether the ranks of ``config`` run on GPUs, on a machine with ``gpus`` of them."""
    return config.launch.device == "cuda" or (config.launch.device == "auto" and gpus > 0)


def nproc_of(config: Config, gpus: int) -> int:
    """How many ranks ``config`` starts on a machine with ``gpus`` GPUs."""
    if config.launch.nproc != "auto":
        return config.launch.nproc
    least = 1
    if config.layout != "auto":
        # Where it does not go into the machines evenly, checks.py says so.
        least = max(1, Layout.smallest(config.layout).world_size // most_nodes(config))
        if config.layout != config._sources.spread_layout:
            return least
    return max(gpus if on_gpu(config, gpus) else RANKS_WITHOUT_GPU, least)


def most_nodes(config: Config) -> int:
    """How many machines ``config`` runs on when all are there."""
    return node_range(config.launch.nnodes)[1]


def world_of(config: Config, gpus: int) -> int:
    """How many ranks the run has when all machines are there, each like one with ``gpus`` GPUs."""
    return nproc_of(config, gpus) * most_nodes(config)


def resolve(config: Config, *, devices: int | None = None) -> Config:
    """``config`` with ``launch.nproc``, ``layout`` and the batch as numbers and a full layout.

    The layout is that of all machines together, when as many as ``launch.nnodes`` allows are
    there. ``devices`` is the number of GPUs, counted on this machine when ``None``. Raises
    ``LayoutError`` when the layout does not fit the ranks;
    ``paceline.config.check`` says so before.
    """
    gpus = count_gpus() if devices is None else devices
    nproc, world_size = nproc_of(config, gpus), world_of(config, gpus)
    layout = Layout.parse(config.layout, world_size=world_size)
    layout.check_world(world_size)
    launch = config.launch.model_copy(update={"nproc": nproc})
    # Fixed here, for as long as the run lives: with other ranks it goes on with the same batch.
    batch = config.batch.on(layout.dp)
    return config.model_copy(update={"layout": str(layout), "launch": launch, "batch": batch})


def learning_rate(config: Config) -> float:
    """The full learning rate of the run: ``optimizer.lr`` after ``schedule.lr_scaling``."""
    schedule = config.schedule
    return scaled_lr(
        config.optimizer.lr,
        schedule.lr_scaling,
        config.batch.global_batch,
        schedule.reference_batch,
    )


def dump(config: Config) -> str:
    """``config`` as YAML with every key written out; ``load`` reads it back equal."""
    return yaml_file.write(config.model_dump())


def summary(config: Config) -> str:
    """A resolved config in one line."""
    steps, epochs = config.train.steps, config.train.epochs
    count, unit = (epochs, "epoch") if steps is None else (steps, "step")
    length = f"{count} {unit}{'' if count == 1 else 's'}"
    rate = f"lr {learning_rate(config):g}"
    if config.schedule.lr_scaling != "none":
        rate += (
            f" ({config.optimizer.lr:g} at batch {config.schedule.reference_batch}, "
            f"{config.schedule.lr_scaling} scaling)"
        )
    return (
        f"{config.model.target} on {config.data.target}, {length}, global batch "
        f"{config.batch.global_batch}, {config.optimizer.name}, {rate}, {config.layout}, "
        f"{config.precision}"
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, for editors that complete and check while typing."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Paceline config"
    # true and false are short for "with its defaults" and "not at all".
    track = schema["$defs"]["Track"]["properties"]
    for switched in (*(track[name] for name in ("mlflow", "wandb", "comet")),
                     schema["properties"]["early_stopping"]):  # fmt: skip
        switched["anyOf"].append({"type": "boolean"})
    for items in (
        schema["properties"]["metrics"]["additionalProperties"],
        schema["properties"]["callbacks"]["items"],
        track["trackers"]["items"],
    ):
        items["anyOf"] = [{"$ref": items.pop("$ref")}, {"type": "string"}]
    short_forms = (("compress", "string"), ("local_steps", "integer"), ("ema", "number"))
    for name, kind in short_forms:
        section = schema["properties"][name]
        section["anyOf"] = [{"$ref": section.pop("$ref")}, {"type": kind}]
    return schema
