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

from paceline.compat.deepspeed.engine_numbers import EngineNumbers
from paceline.compat.deepspeed.loss_scale import DeepSpeedScaler
from paceline.compat.deepspeed.saving import EngineFiles, whole_tensors
from paceline.config.deepspeed.settings import DeepSpeedSettings
from paceline.engine.gradients import Gradients
from paceline.engine.prepare import PreparedLoader
from paceline.engine.whole_model import WholeModel
from paceline.errors import CheckpointError, TrainingError
from paceline.world import World

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedEngine(EngineNumbers):
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
        last = last or self.optimizer is None  # nothing is trained, and nothing is sent
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

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Nothing: ``backward`` has averaged them, or ``step`` does."""

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` changed the parameters."""
        return self._applied

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

    def module_state_dict(self, **unknown: Any) -> dict[str, Tensor]:
        """The model's whole state dict, on the CPU of every rank. A collective."""
        if any(unknown.values()):
            raise TrainingError(
                f"module_state_dict({', '.join(unknown)}=…) is not supported. Leave it out."
            )
        return whole_tensors(self.module)

    def load_module_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, **_: Any
    ) -> None:
        """Give the model the values of a whole state dict, whatever part this rank holds."""
        self._files.fill_module(state_dict, strict=strict)

    def destroy(self) -> None:
        """Nothing: what the engine holds goes with it."""

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
