"""What scripts ask of a DeepSpeed engine: its batch, rates, scale, ranks and config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from paceline.compat.deepspeed.loss_scale import DeepSpeedScaler
from paceline.config.deepspeed.settings import DeepSpeedBatch, DeepSpeedSettings
from paceline.errors import TrainingError
from paceline.world import World


class EngineNumbers(nn.Module):
    """The questions; ``DeepSpeedEngine`` does the work."""

    world: World
    settings: DeepSpeedSettings
    optimizer: Optimizer | None
    scaler: DeepSpeedScaler | None
    training_dataloader: Any
    mpu = None
    """No other library's tensor parallelism."""
    _batch: DeepSpeedBatch
    _norm: float | None

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    @property
    def local_rank(self) -> int:
        """The rank on this machine."""
        return self.world.local_rank

    @property
    def global_rank(self) -> int:
        """The rank among all."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.world.size

    @property
    def dp_world_size(self) -> int:
        """How many ranks share the batch: all of them."""
        return self.world.size

    def train_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        assert self._batch.train_batch_size is not None
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a rank in one forward."""
        assert self._batch.micro_batch is not None
        return self._batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        assert self._batch.accumulation is not None
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, of a micro-batch, and micro-batches of a step."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def get_lr(self) -> list[float]:
        """The learning rate of every group."""
        return [] if self.optimizer is None else [float(g["lr"]) for g in self._groups]

    def get_mom(self) -> list[Any]:
        """The betas, or the momentum, of every group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradient, before it was clipped."""
        return self._norm

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied by."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return self.cur_scale

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0: none."""
        return self.settings.clip_norm or 0.0

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.zero > 0

    def zero_optimization_stage(self) -> int:
        """ZeRO's stage."""
        return self.settings.zero

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.settings.precision == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.scaler is not None and self.settings.loss_scaling.fixed is None

    @property
    def data_parallel_group(self) -> Any:
        """The group of torch that shares the batch: all ranks."""
        return dist.group.WORLD

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of samples for a step, by other micro-batches of the same size."""
        self._check_own_loader("set_train_batch_size")
        together = self.train_micro_batch_size_per_gpu() * self.world.size
        if train_batch_size < 1 or train_batch_size % together:
            raise TrainingError(
                f"set_train_batch_size({train_batch_size}): it must be a multiple of "
                f"train_micro_batch_size_per_gpu × ranks = {together}."
            )
        self._batch = replace(
            self._batch,
            train_batch_size=train_batch_size,
            accumulation=train_batch_size // together,
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of samples for a rank's forward, and as many of them in a step."""
        self._check_own_loader("set_train_micro_batch_size")
        total = micro_batch_size * self.gradient_accumulation_steps() * self.world.size
        self._batch = replace(self._batch, train_batch_size=total, micro_batch=micro_batch_size)

    def _check_own_loader(self, call: str) -> None:
        if self.training_dataloader is not None:
            raise TrainingError(
                f"engine.{call}: the loader of training_data= has its batch size already. Leave "
                "training_data out and read the data with a loader of your own."
            )

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int = 0,
        data_sampler: Any = None,
        **_: Any,
    ) -> DataLoader[Any]:
        """A loader of this rank's part of ``dataset``, in micro-batches, not shuffled."""
        if data_sampler is None:
            data_sampler = DistributedSampler(
                dataset, self.world.size, self.world.rank, shuffle=False
            )
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=self.settings.drop_last,
        )
