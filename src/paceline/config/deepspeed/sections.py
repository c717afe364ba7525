"""``deepspeed: ds_config.json`` in a config: the file's settings as sections of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config.deepspeed.read import load_ds_config
from paceline.config.deepspeed.schedules import SCHEDULES
from paceline.config.deepspeed.settings import DeepSpeedSettings, read_settings
from paceline.config.deepspeed.table import KEYS
from paceline.config.fields import OPTIMIZERS
from paceline.config.keys import flat
from paceline.errors import ConfigError, LayoutError
from paceline.layout import Layout

_SHORT = {path: name for name, path in OPTIMIZERS.items()}
_BATCH = {
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.per_device_batch",
    "gradient_accumulation_steps": "batch.accumulate",
}
_ANSWERS = {
    "optimizer.params.lr": "optimizer.lr",
    **{
        f"scheduler.params.{name}": f"schedule.args.{name}"
        for takes in SCHEDULES.values()
        for name, default in takes.items()
        if default is ... or name == "warmup_num_steps"
    },
}
"""The keys that must be said here where DeepSpeed's config says "auto"."""
_NEVER_GROWS = 2**31 - 1
"""Steps until a fixed loss scale would grow: the largest number that torch counts to."""


@dataclass
class Expansion:
    """A config with DeepSpeed's settings in it, what each key became, and what to know."""

    data: dict[str, Any]
    mapped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def expand(data: Mapping[str, Any], folder: str) -> Expansion:
    """``data`` with what its key ``deepspeed`` asks for in the sections that say the same here.

    A file is looked for in ``folder`` first. What is given in both, and differs, is refused.
    """
    own = {key: value for key, value in data.items() if key != "deepspeed"}
    source = data.get("deepspeed")
    if source is None:
        return Expansion(dict(own))
    config = loaded(source, folder)
    name = "deepspeed" if isinstance(source, Mapping) else os.fspath(source)
    settings = read_settings(config, name=name)
    sections, origins = _sections(settings, own)
    given = flat(own)
    problems = _unanswered(settings, {**given, **sections})
    problems += _clashes(sections, origins, given)
    if problems:
        raise ConfigError(problems)
    mapped = [f"{origins[key]} is {key}: {_shown(value)}" for key, value in sections.items()]
    mapped += [_of_auto(key) for key in settings.autos if key not in origins.values()]
    mapped += [str(report) for report in settings.reports if report.fate == "noted" and report.text]
    notes = [*settings.notes, *_scaler_notes(settings)]
    return Expansion(_merged(own, sections), mapped, notes)


def loaded(source: Any, folder: str) -> dict[str, Any]:
    """The mapping that ``deepspeed`` names, or is; a file is looked for in ``folder`` first."""
    if source is None:
        return {}
    if not isinstance(source, str | os.PathLike | Mapping):
        raise ConfigError(
            "deepspeed must be the path of a DeepSpeed config, or the mapping in it; got "
            f"{_shown(source)}"
        )
    if not isinstance(source, Mapping) and os.path.exists(beside := os.path.join(folder, source)):
        source = beside
    return load_ds_config(source)


def _sections(
    settings: DeepSpeedSettings, own: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Our keys with their values, and the DeepSpeed key that each is from."""
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def put(key: str, value: Any, origin: str) -> None:
        found[key], origins[key] = value, origin

    for theirs, ours in _BATCH.items():
        if (value := settings.values.get(theirs)) is not None:
            put(ours, value, theirs)
    if settings.optimizer is not None:
        args = dict(settings.optimizer.args)
        name = settings.optimizer.name
        put("optimizer.name", _SHORT.get(name, name), "optimizer.type")
        if "optimizer.params.lr" not in settings.autos:
            put("optimizer.lr", args.pop("lr", 1e-3), "optimizer.params.lr")
        if (decay := args.pop("weight_decay", None)) is not None:
            put("optimizer.weight_decay", decay, "optimizer.params.weight_decay")
        if args:
            put("optimizer.args", args, "optimizer.params")
    if settings.schedule is not None:
        put("schedule.name", settings.schedule.name, "scheduler.type")
        put("schedule.warmup_steps", 0, "scheduler.type")
        args = {**_filled_in(settings, own), **settings.schedule.args}
        for name, value in args.items():
            put(f"schedule.args.{name}", value, f"scheduler.params.{name}")
    given = flat(own)
    clipping_is_given = "gradient_clipping" in settings.values
    if clipping_is_given or not (
        "train.clip_norm" in given or "gradient_clipping" in settings.autos
    ):
        put("train.clip_norm", settings.clip_norm, "gradient_clipping")
    switched_off = settings.values.get(f"{own.get('precision')}.enabled") is False
    if settings.precision != "fp32":
        put("precision", settings.precision, _origin_of_precision(settings))
    elif switched_off:
        put("precision", "fp32", f"{own['precision']}.enabled")
    if settings.precision == "fp16":
        scale = settings.loss_scaling
        fixed = scale.fixed is not None
        origin = "fp16.loss_scale" if fixed else "fp16.initial_scale_power"
        put("loss_scaling.init_scale", scale.fixed or scale.initial, origin)
        interval = _NEVER_GROWS if fixed else scale.window
        origin = "fp16.loss_scale" if fixed else "fp16.loss_scale_window"
        put("loss_scaling.growth_interval", interval, origin)
    if (layout := _layout(settings, own)) is not None:
        put("layout", layout, "zero_optimization.stage")
    if settings.offload is not None:
        put("sharding.offload", settings.offload, "zero_optimization.offload")
    if settings.reshard is not None:
        put("sharding.reshard", settings.reshard, "zero_optimization.zero_hpz_partition_size")
    if settings.drop_last:
        put("data.drop_last", True, "dataloader_drop_last")
    for key, value, origin in _trackers(settings):
        put(key, value, origin)
    return found, origins


def _origin_of_precision(settings: DeepSpeedSettings) -> str:
    """The key that switched the number format on."""
    key = f"{settings.precision}.enabled"
    return key if settings.values.get(key) else "torch_autocast.enabled"


def _filled_in(settings: DeepSpeedSettings, own: Mapping[str, Any]) -> dict[str, Any]:
    """What "auto" stands for in a schedule, where another key of either config says it."""
    given = flat(own)
    assert settings.schedule is not None
    rate = given.get("optimizer.lr")
    if rate is None and settings.optimizer is not None:
        rate = settings.optimizer.args.get("lr")
    known = {"warmup_max_lr": rate, "total_num_steps": given.get("train.steps")}
    return {
        name: value
        for name, value in known.items()
        if value is not None
        and f"scheduler.params.{name}" in settings.schedule.autos
        and f"schedule.args.{name}" not in given
    }


def _of_auto(key: str) -> str:
    """Where the value of a key that says "auto" comes from."""
    if key in KEYS:
        return f'{key} is "auto": {KEYS[key].auto} says it'
    return f'{key} is "auto": {_ANSWERS.get(key, "its default")} says it'


def _scaler_notes(settings: DeepSpeedSettings) -> list[str]:
    """What torch's gradient scaler, which runs of a config use, does otherwise."""
    scale, values = settings.loss_scaling, settings.values
    if settings.precision != "fp16":
        return []
    if scale.fixed is not None:
        return ["fp16.loss_scale: the scale never grows, but each overflow halves it here"]
    notes = []
    if scale.hysteresis > 1:
        notes.append(
            f"fp16.hysteresis is {scale.hysteresis}: here every overflow halves the scale, in "
            "DeepSpeed only one after so many. paceline.compat.deepspeed does it as DeepSpeed"
        )
    if values.get("fp16.min_loss_scale") is not None:
        notes.append("fp16.min_loss_scale: the scale has no least value in runs of a config")
    return notes


def _layout(settings: DeepSpeedSettings, own: Mapping[str, Any]) -> str | None:
    """The config's own layout with the stage, and ``tp``, of DeepSpeed's config added to it."""
    wanted = {"zero": settings.zero or None, "tp": settings.tp if settings.tp > 1 else None}
    asked = {name: value for name, value in wanted.items() if value is not None}
    given = own.get("layout", "auto")
    if not asked or not isinstance(given, str):
        return None
    if given.strip() == "auto":
        return ",".join(f"{name}={value}" for name, value in asked.items())
    try:
        layout = Layout.smallest(given)
    except LayoutError:
        return None  # its own check says what is wrong with it
    missing = []
    for name, value in asked.items():
        there = getattr(layout, name)
        if f"{name}=" not in given.replace(" ", ""):
            missing.append(f"{name}={value}")
        elif there != value:
            raise ConfigError(
                f"layout {given!r} has {name}={there}, and deepspeed asks for {name}={value} "
                f"({'zero_optimization.stage' if name == 'zero' else 'tensor_parallel'}). Leave "
                f"{name} out of the layout, or make them agree."
            )
    return ",".join([given, *missing]) if missing else None


def _trackers(settings: DeepSpeedSettings) -> list[tuple[str, Any, str]]:
    values, found = settings.values, []
    for theirs, ours in (("tensorboard", "tensorboard"), ("csv_monitor", "csv")):
        if values.get(f"{theirs}.enabled"):
            found.append((f"track.{ours}", True, f"{theirs}.enabled"))
    for name, keys in (
        ("wandb", {"project": "project", "team": "entity"}),
        ("comet", {"project": "project", "workspace": "workspace"}),
    ):
        if values.get(f"{name}.enabled"):
            given = {ours: values.get(f"{name}.{theirs}") for theirs, ours in keys.items()}
            section: Any = {key: value for key, value in given.items() if value} or True
            found.append((f"track.{name}", section, f"{name}.enabled"))
    return found


def _unanswered(settings: DeepSpeedSettings, given: Mapping[str, Any]) -> list[str]:
    """What says "auto" there and nothing here."""
    asked = [key for key in settings.autos if key in _ANSWERS]
    sizes = any(given.get(key) is not None for key in _BATCH.values())
    problems = [
        f'deepspeed: {key} is "auto": say {_ANSWERS[key]} in this config.'
        for key in asked
        if given.get(_ANSWERS[key]) is None
    ]
    if not sizes:
        problems.append(
            "deepspeed: no size of a batch is given: say batch.global_batch, or "
            "batch.per_device_batch, in this config."
        )
    return problems


def _clashes(
    sections: Mapping[str, Any], origins: Mapping[str, str], given: Mapping[str, Any]
) -> list[str]:
    """Keys that are given here too, with another value."""
    problems = []
    for key, value in flat(sections).items():
        told = next((name for name in (key, key.rpartition(".")[0]) if name in origins), key)
        if key in given and given[key] != value and key != "layout":
            problems.append(
                f"{key}={_shown(given[key])} and deepspeed's {origins.get(told, told)} "
                f"({key}={_shown(value)}) differ. Leave one of them out."
            )
    return problems


def _merged(own: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: _copied(value) for key, value in own.items()}
    for dotted, value in sections.items():
        *path, last = dotted.split(".")
        section = merged
        for name in path:
            inner = section.get(name)
            if inner is not None and not isinstance(inner, dict):
                break  # its own check says what is wrong with it
            section = section.setdefault(name, {})
        else:
            if isinstance(value, Mapping):
                value = {**value, **section.get(last, {})}
            section[last] = value
    return merged


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
