"""The engine that ``initialize`` returns: DeepSpeed's methods on ``paceline.prepare``."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.compat.deepspeed.loss_scale import DeepSpeedScaler
from paceline.compat.deepspeed.saving import EngineFiles, whole_tensors
from paceline.config.deepspeed.settings import DeepSpeedSettings
from paceline.engine.gradients import Gradients
from paceline.engine.prepare import PreparedLoader
from paceline.engine.whole_model import WholeModel
from paceline.errors import CheckpointError, TrainingError
from paceline.world import World

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedEngine(nn.Module):
    """A model with ``backward`` and ``step``, as DeepSpeed's scripts drive it.

    Made by ``initialize``. ``module`` is your model; calling the engine calls it, in the config's
    number format. ``step`` counts micro-batches, and updates at the last one of an accumulation.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        optimizer: Optimizer | None,
        settings: DeepSpeedSettings,
        *,
        lr_scheduler: Any = None,
        loader: Any = None,
        whole: WholeModel,
        group_names: list[list[str]],
    ) -> None:
        super().__init__()
        self.module = model
        # Not as submodules: parameters() and state_dict() are those of the model.
        self._spread = [wrapped]
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.training_dataloader = loader
        self.settings = settings
        self.world = World.current()
        self._batch = settings.batch.on(self.world.size)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        scaling = settings.loss_scaling
        if not settings.zero:  # DeepSpeed lowers the scale at every overflow there
            scaling = replace(scaling, hysteresis=1)
        self.scaler = DeepSpeedScaler(scaling) if self.fp16_enabled() else None
        self._boundary: bool | None = None
        self._syncing = True
        self._backwards = 0
        self._overflowed = self._applied = False
        self._norm: float | None = None
        self._files = EngineFiles(model, optimizer, whole, group_names)
        if optimizer is not None:
            # After prepare's own hook, which finishes the gradients, and before any offloading.
            optimizer.register_step_pre_hook(lambda *_: self._finish_gradients())

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, in the config's number format."""
        wrapped = self._spread[0]
        last = self.is_gradient_accumulation_boundary() and self._syncing
        alone = contextlib.nullcontext() if last or not self.training else _no_sync(wrapped)
        with alone, self._autocast():
            return wrapped(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **unknown: Any
    ) -> Tensor:
        """Gradients of ``loss``, divided by the number of micro-batches of a step."""
        if unknown:
            raise TrainingError(
                f"engine.backward({', '.join(unknown)}=…): it takes loss, retain_graph and "
                "scale_wrt_gas. Leave the others out."
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TrainingError(
                f"engine.backward: the loss must be a tensor of one number; got "
                f"{type(loss).__name__}"
                + (f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else "")
                + ". Take its mean first."
            )
        factor = self._loss_weight() if scale_wrt_gas else 1.0
        if self.scaler is not None:
            factor *= self.scaler.scale
        # Scaled in half precision, a loss overflows where its gradients would not.
        wide = loss.float() if loss.dtype in _LOW.values() else loss
        (wide * factor).backward(retain_graph=retain_graph)
        self._backwards += 1
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """After each ``backward``: at the last micro-batch of a step the parameters change."""
        if self.optimizer is None:
            raise TrainingError(
                "engine.step: there is no optimizer. Name one in the config (optimizer.type), or "
                "pass optimizer= to initialize()."
            )
        if not self._backwards:
            raise TrainingError(
                "engine.step: no engine.backward(loss) came before it. Call that instead of "
                "loss.backward(), which knows neither the loss scale nor the accumulation."
            )
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            self._update(lr_kwargs or {})
        self.micro_steps += 1

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        assert self.optimizer is not None
        self.optimizer.step()  # _finish_gradients is a hook of it
        self.optimizer.zero_grad(set_to_none=True)
        self._backwards = 0
        self._applied = not self._overflowed
        if self._overflowed:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if self.scaler is not None:
            self.scaler.update(self._overflowed)
        elif self._overflowed:
            warnings.warn(
                f"step {self.global_steps}: the gradients are not finite, so the step was left out "
                "(engine.skipped_steps counts them).",
                stacklevel=3,
            )

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        """Unscale, look for overflows on all ranks, clip; after an overflow nothing is left."""
        assert self.optimizer is not None
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = Gradients(held, self._counts(), self.world.device)
        if self.scaler is not None:
            gradients.scale(torch.tensor(1 / self.scaler.scale))
        norm = gradients.norm()
        self._norm = float(norm)
        self._overflowed = not bool(torch.isfinite(norm))
        if self._overflowed:
            for parameter in held:
                parameter.grad = None
        elif self.settings.clip_norm is not None:
            gradients.clip_norm(self.settings.clip_norm, norm)

    def _counts(self) -> Any:
        """Which gradients enter the norm here: all, where each rank has the whole of them."""
        if not self.settings.zero or self.world.size == 1:
            return None
        whole = {
            id(p)
            for p in self.module.parameters()
            if not hasattr(p, "placements") and self.world.rank != 0
        }
        return lambda parameter: id(parameter) not in whole

    def _loss_weight(self) -> float:
        """What this micro-batch counts for in its step."""
        loader = self.training_dataloader
        if isinstance(loader, PreparedLoader) and loader.share is not None:
            return loader.weight
        return 1 / self.gradient_accumulation_steps()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward without averaging over the ranks; ``step`` must come after it."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        low = _LOW.get(self.settings.precision)
        if low is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=low)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last one of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide yourself where a step ends."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this accumulation."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` changed the parameters."""
        return self._applied

    # ------------------------------------------------------------------ numbers

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

    # ------------------------------------------------------------------ state

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything as ``save_dir/tag``; every rank calls it.

        A checkpoint of Paceline's: every byte is checked on load, which any number of ranks and
        any stage can do. ``client_state`` must be plain values.
        """
        if exclude_frozen_parameters:
            raise TrainingError(
                "save_checkpoint(exclude_frozen_parameters=True): a checkpoint holds the whole "
                "model. Leave it out."
            )
        own = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "schedule": self._schedule_state(),
            "client_state": client_state or {},
        }
        state = self._files.collect(self.global_steps)
        self._files.save(save_dir, tag, self.global_steps, state, own, latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **unknown: Any,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from ``load_dir/tag``, or from the latest save; ``(None, None)`` without one.

        A checkpoint that DeepSpeed itself wrote gives its weights, and no more.
        """
        if any(value is not None for value in unknown.values()):
            raise TrainingError(
                f"load_checkpoint({', '.join(unknown)}=…) is not supported. Load the module by "
                "hand: engine.module.load_state_dict(…)."
            )
        found = self._files.find(load_dir, tag)
        if found is None:
            warnings.warn(
                f"{load_dir}: there is no file 'latest', so nothing is loaded. Name a tag.",
                stacklevel=2,
            )
            return None, None
        path, checkpoint = found
        if checkpoint is None:
            self._files.load_foreign(path, strict=load_module_strict)
            return str(path), {}
        own = self._files.load(
            checkpoint,
            optimizer=load_optimizer_states and not load_module_only,
            strict=load_module_strict,
        )
        if not load_module_only:
            self._take(own, schedule=load_lr_scheduler_states)
        return str(path), own.get("client_state", {})

    def _take(self, own: dict[str, Any], *, schedule: bool) -> None:
        for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps"):
            setattr(self, name, own.get(name, 0))
        if self.scaler is not None and own.get("scaler") is not None:
            self.scaler.load_state_dict(own["scaler"])
        if schedule and self.lr_scheduler is not None and own.get("schedule") is not None:
            self.lr_scheduler.load_state_dict(own["schedule"])

    def _schedule_state(self) -> Any:
        if self.lr_scheduler is None or not hasattr(self.lr_scheduler, "state_dict"):
            return None
        return self.lr_scheduler.state_dict()

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin", **_: Any
    ) -> bool:
        """The whole model's weights in one file, in the config's number format."""
        weights = whole_tensors(self.module, _LOW.get(self.settings.precision))
        if self.world.rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            try:
                torch.save(weights, os.path.join(save_dir, save_filename))
            except OSError as error:
                raise CheckpointError(f"{save_dir}: cannot be written: {error}.") from error
        if self.world.size > 1:
            dist.barrier()
        return True

    save_fp16_model = save_16bit_model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        modules = self.__dict__.get("_modules", {})
        if "module" in modules and hasattr(modules["module"], name):
            return getattr(modules["module"], name)
        raise AttributeError(
            f"engine.{name}: neither this engine nor your model has it. What there is of "
            "DeepSpeed's engine is in docs/guides/deepspeed.md; for more, use paceline.Engine."
        )


@contextlib.contextmanager
def _no_sync(wrapped: nn.Module) -> Iterator[None]:
    with wrapped.no_sync():  # type: ignore[operator]
        yield
