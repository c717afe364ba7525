"""What a DeepSpeed config asks for, in values that an engine or a config of ours can be made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.config.deepspeed.keys import AUTO
from paceline.config.deepspeed.optimizers import OptimizerChoice, choose_optimizer
from paceline.config.deepspeed.read import KeyReport, Reading, load_ds_config, read_keys
from paceline.config.deepspeed.schedules import ScheduleChoice, choose_schedule
from paceline.errors import ConfigError

DEFAULT_CLIPPING = 1.0
"""What DeepSpeed clips gradients to where its config says nothing."""

_ZERO = "zero_optimization."


@dataclass(frozen=True)
class Fp16Scaling:
    """The scale of losses in fp16: fixed, or one that follows overflows."""

    fixed: float | None = None
    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0


@dataclass(frozen=True)
class DeepSpeedBatch:
    """DeepSpeed's three numbers of a batch, as far as they are given."""

    train_batch_size: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None

    def on(self, ranks: int) -> DeepSpeedBatch:
        """All three on so many data-parallel ranks; contradictions are refused."""
        total, micro, passes = self.train_batch_size, self.micro_batch, self.accumulation
        if total is None and micro is None:
            alone = f" gradient_accumulation_steps={passes} alone does not say." if passes else ""
            raise ConfigError(
                "train_batch_size or train_micro_batch_size_per_gpu must say how many samples a "
                f"step takes.{alone}"
            )
        if micro is None:
            assert total is not None
            passes = passes or 1
            micro = total // (ranks * passes)
        elif passes is None:
            passes = 1 if total is None else total // (micro * ranks)
        if total is None:
            total = micro * passes * ranks
        if total != micro * passes * ranks or not micro or not passes:
            raise ConfigError(
                f"train_batch_size={total} is not train_micro_batch_size_per_gpu × "
                f"gradient_accumulation_steps × data-parallel ranks = {self._shown(ranks)}. Leave "
                "one of the three out, or make them agree."
            )
        return DeepSpeedBatch(total, micro, passes)

    def _shown(self, ranks: int) -> str:
        if self.micro_batch is not None and self.accumulation is not None:
            product = self.micro_batch * self.accumulation * ranks
            return f"{self.micro_batch} × {self.accumulation} × {ranks} = {product}"
        return f"{self.micro_batch or '?'} × {self.accumulation or '?'} × {ranks}"


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed config, read: what has an effect here, and what to know of the rest."""

    batch: DeepSpeedBatch
    precision: Literal["fp32", "bf16", "fp16"]
    loss_scaling: Fp16Scaling
    zero: int
    offload: Literal["parameters", "optimizer"] | None
    reshard: int | None
    tp: int
    optimizer: OptimizerChoice | None
    schedule: ScheduleChoice | None
    clip_norm: float | None
    drop_last: bool
    reports: tuple[KeyReport, ...]
    notes: tuple[str, ...]
    autos: tuple[str, ...]
    values: Mapping[str, Any] = field(repr=False)


def read_settings(
    source: str | os.PathLike[str] | Mapping[str, Any],
    auto: Mapping[str, Any] | None = None,
    *,
    name: str = "",
) -> DeepSpeedSettings:
    """Read ``ds_config.json``, or the mapping in it; every problem of it is in the error.

    ``auto`` says what "auto" stands for, by dotted keys such as ``optimizer.params.lr``; keys that
    say it and are not there are in ``autos``. ``name`` is what messages call the config.
    """
    config = _filled(load_ds_config(source), auto or {})
    reading = read_keys(config)
    settings = _settings(reading)
    if reading.problems:
        told = name or ("DeepSpeed config" if isinstance(source, Mapping) else os.fspath(source))
        raise ConfigError([f"{told}: {problem}" for problem in reading.problems])
    return settings


def _filled(config: Mapping[str, Any], auto: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """``config`` with what "auto" stands for."""
    filled = {}
    for key, value in config.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            value = _filled(value, auto, f"{name}.")
        elif value == AUTO and name in auto:
            value = auto[name]
        filled[key] = value
    return filled


def _settings(reading: Reading) -> DeepSpeedSettings:
    values = reading.values
    optimizer = _optimizer(reading)
    schedule = _schedule(reading)
    notes = list(reading.notes)
    for choice in (optimizer, schedule):
        if choice is not None:
            reading.problems += choice.problems
            reading.autos += choice.autos
            notes += getattr(choice, "notes", [])
    zero = _stage(reading)
    precision = _precision(reading)
    clipping = values.get("gradient_clipping")
    if "gradient_clipping" not in values and "gradient_clipping" not in reading.autos:
        clipping = DEFAULT_CLIPPING
        notes.append("gradient_clipping is left out: gradients are clipped to 1.0, as in DeepSpeed")
    if clipping is not None and clipping < 0:
        reading.problems.append(f"gradient_clipping={clipping} must be 0 (none) or more.")
    return DeepSpeedSettings(
        batch=_batch(reading),
        precision=precision,
        loss_scaling=_loss_scaling(reading),
        zero=zero,
        offload=_offload(reading, zero),
        reshard=_reshard(reading, zero),
        tp=max(values.get("tensor_parallel.autotp_size") or 1, 1),
        optimizer=optimizer,
        schedule=schedule,
        clip_norm=clipping or None,
        drop_last=bool(values.get("dataloader_drop_last")),
        reports=tuple(reading.reports),
        notes=tuple(notes),
        autos=tuple(reading.autos),
        values=values,
    )


def _optimizer(reading: Reading) -> OptimizerChoice | None:
    kind = reading.values.get("optimizer.type")
    params = reading.values.get("optimizer.params") or {}
    if kind is None:
        if params:
            reading.problems.append("optimizer.type is missing: optimizer.params is of none.")
        return None
    return choose_optimizer(kind, params)


def _schedule(reading: Reading) -> ScheduleChoice | None:
    kind = reading.values.get("scheduler.type")
    params = reading.values.get("scheduler.params") or {}
    if kind is None:
        if params:
            reading.problems.append("scheduler.type is missing: scheduler.params is of none.")
        return None
    return choose_schedule(kind, params)


def _batch(reading: Reading) -> DeepSpeedBatch:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        if (value := reading.values.get(name)) is not None and value < 1:
            reading.problems.append(f"{name}={value} must be 1 or more.")
            return DeepSpeedBatch()
    total, micro, passes = (reading.values.get(name) for name in names)
    if total and micro and total % (micro * (passes or 1)):
        reading.problems.append(
            f"train_batch_size={total} is not a multiple of train_micro_batch_size_per_gpu={micro}"
            + (f" × gradient_accumulation_steps={passes} = {micro * passes}" if passes else "")
            + ", so it fits no number of ranks. Leave one of them out, or make them agree."
        )
    return DeepSpeedBatch(total, micro, passes)


def _precision(reading: Reading) -> Literal["fp32", "bf16", "fp16"]:
    values = reading.values
    names = {"fp16": "fp16.enabled", "bf16": "bf16.enabled"}
    on = [name for name, key in names.items() if values.get(key)]
    if values.get("torch_autocast.enabled"):
        dtype = str(values.get("torch_autocast.dtype") or "bfloat16").removeprefix("torch.")
        known = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
        if dtype not in known:
            reading.problems.append(
                f"torch_autocast.dtype={dtype!r} must be 'bfloat16' or 'float16'."
            )
        else:
            on.append(known[dtype])
    if len(set(on)) > 1:
        reading.problems.append(
            f"{' and '.join(on)} are both enabled: a run computes in one of them. Switch one off."
        )
    if "fp16" in on:
        return "fp16"
    return "bf16" if on else "fp32"


def _loss_scaling(reading: Reading) -> Fp16Scaling:
    values = {
        name.removeprefix("fp16."): value
        for name, value in reading.values.items()
        if name.startswith("fp16.") and value is not None
    }
    fixed = values.get("loss_scale", 0)
    if fixed < 0:
        reading.problems.append(f"fp16.loss_scale={fixed} must be 0 (dynamic) or more.")
    for name in ("loss_scale_window", "hysteresis"):
        if values.get(name, 1) < 1:
            reading.problems.append(f"fp16.{name}={values[name]} must be 1 or more.")
    power = values.get("initial_scale_power", 16)
    if not 0 <= power <= 1000:
        reading.problems.append(f"fp16.initial_scale_power={power} must be from 0 to 1000.")
        power = 16
    return Fp16Scaling(
        fixed=float(fixed) or None,
        initial=2.0**power,
        window=values.get("loss_scale_window", 1000),
        hysteresis=values.get("hysteresis", 2),
        consecutive_hysteresis=values.get("consecutive_hysteresis", False),
        minimum=float(values.get("min_loss_scale", 1)),
    )


def _stage(reading: Reading) -> int:
    stage = reading.values.get(f"{_ZERO}stage") or 0
    if stage not in (0, 1, 2, 3):
        reading.problems.append(f"{_ZERO}stage={stage} must be 0, 1, 2 or 3.")
        return 0
    return int(stage)


def _offload(reading: Reading, zero: int) -> Literal["parameters", "optimizer"] | None:
    values = reading.values
    parameters = _device(reading, "offload_param") or bool(
        values.get(f"{_ZERO}cpu_offload_param") or values.get(f"{_ZERO}cpu_offload_params")
    )
    state = _device(reading, "offload_optimizer") or bool(values.get(f"{_ZERO}cpu_offload"))
    if (parameters or state) and not zero:
        reading.problems.append(
            f"{_ZERO}{'offload_param' if parameters else 'offload_optimizer'} needs a stage: 1, 2 "
            "or 3. Set zero_optimization.stage, or leave it out."
        )
        return None
    if parameters and zero != 3:
        reading.problems.append(
            f"{_ZERO}offload_param needs stage 3, and stage is {zero}. Set "
            "zero_optimization.stage to 3, or use offload_optimizer alone."
        )
    if parameters:
        return "parameters"
    return "optimizer" if state else None


def _device(reading: Reading, section: str) -> bool:
    """Whether a section of offloading asks for the CPU."""
    device = reading.values.get(f"{_ZERO}{section}.device") or "none"
    if device not in ("none", "cpu"):
        why = "nothing is kept on disks" if device == "nvme" else "there is no such device"
        reading.problems.append(
            f"{_ZERO}{section}.device={device!r} is not supported: {why}. Use 'cpu' or 'none'."
        )
    return bool(device == "cpu")


def _reshard(reading: Reading, zero: int) -> int | None:
    ranks = reading.values.get(f"{_ZERO}zero_hpz_partition_size") or 1
    if ranks > 1 and zero != 3:
        reading.problems.append(
            f"{_ZERO}zero_hpz_partition_size={ranks} needs stage 3. Leave it out."
        )
    return int(ranks) if ranks > 1 and zero == 3 else None
