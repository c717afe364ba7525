"""The ways to train that are compared: Paceline's formats, DDP and its hooks, Accelerate."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wiring.task import Batch, Task, mean_loss

# One bucket for all gradients: torch's PowerSGD hook begins collectives in callbacks of earlier
# ones, which run in another order on every rank as soon as there are two buckets.
_ONE_BUCKET_MB = 1000
# The hook refuses to begin before the second step; by default it begins at the thousandth.
_FIRST_POWERSGD_STEP = 2


@dataclass(frozen=True)
class Way:
    """One way: who trains (``paceline``, ``ddp``, ``accelerate``), and with what settings."""

    name: str
    who: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def settled_after(self) -> int:
        """The step after which all steps send alike: buckets are laid out, warm-up is over."""
        compress = self.settings.get("compress", {})
        return 3 + max(compress.get("warmup_steps", 0), self.settings.get("first_step", 0))


class Training:
    """A way at work on a rank: ``step`` trains on a batch, ``sent`` counts the bytes, if it can."""

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[Batch], float | None],
        sent: Callable[[], float | None] = lambda: None,
        evaluate: Callable[[Batch], float] | None = None,
    ) -> None:
        self.model, self.step, self.sent = model, step, sent
        self.evaluate = evaluate or (lambda batch: loss_of(model, batch))


def paceline_format(name: str, text: str, **options: Any) -> Way:
    """Paceline with a format; ``options`` are further ones of ``paceline.Compression``.

    From the first step on, unless they say otherwise.
    """
    return Way(name, "paceline", {"compress": {"format": text, "warmup_steps": 0, **options}})


def in_one_bucket(way: Way) -> Way:
    """The same with all gradients in one bucket: fewer messages, where each takes long."""
    return Way(
        f"{way.name}, one bucket", way.who, {**way.settings, "bucket_cap_mb": _ONE_BUCKET_MB}
    )


def powersgd_hook(who: str, rank: int, *, one_bucket: bool) -> Way:
    """torch's own PowerSGD hook, by hand or through Accelerate."""
    label = {"ddp": "DDP", "accelerate": "Accelerate"}[who]
    buckets = ", one bucket" if one_bucket else ""
    settings = {"hook": "power_sgd", "rank": rank, "first_step": _FIRST_POWERSGD_STEP}
    if one_bucket:
        settings["bucket_cap_mb"] = _ONE_BUCKET_MB
    return Way(f"{label} PowerSGD {rank}{buckets}", who, settings)


FORMATS = [
    "none", "fp16", "bf16", "int8", "sign", "topk:0.01", "topk:0.001", "topk:0.01+fp16",
    "randomk:0.01", "powersgd:1", "powersgd:4", "powersgd:4+fp16",
]  # fmt: skip
"""All of Paceline's."""

PLAIN = Way("DDP", "ddp")

BASELINES = [
    PLAIN,
    Way("DDP fp16 hook", "ddp", {"hook": "fp16"}),
    Way("DDP bf16 hook", "ddp", {"hook": "bf16"}),
    powersgd_hook("ddp", 1, one_bucket=False),
    powersgd_hook("ddp", 1, one_bucket=True),
    powersgd_hook("ddp", 4, one_bucket=True),
    Way("DDP batched PowerSGD 1", "ddp",
        {"hook": "batched_power_sgd", "rank": 1, "first_step": _FIRST_POWERSGD_STEP,
         "bucket_cap_mb": _ONE_BUCKET_MB}),
    powersgd_hook("accelerate", 4, one_bucket=False),
    powersgd_hook("accelerate", 4, one_bucket=True),
]  # fmt: skip


def build(way: Way, task: Task, device: torch.device) -> Training:
    """The way on this rank, connected with the others."""
    makers = {"paceline": _paceline, "ddp": _ddp, "accelerate": _accelerate}
    return makers[way.who](way.settings, task, device)


def loss_of(model: nn.Module, batch: Batch) -> float:
    """The mean loss of ``model`` on a batch, a few windows at a time."""
    with torch.no_grad():
        losses = [
            mean_loss(model(inputs), targets)
            for inputs, targets in zip(*(part.split(32) for part in batch), strict=True)
        ]
    return float(torch.stack(losses).mean())


def _paceline(settings: dict[str, Any], task: Task, device: torch.device) -> Training:
    import paceline
    from paceline.models.gpt import token_cross_entropy

    paceline.World.init(backend="gloo", device=device)
    model = task.model().to(device)
    options: dict[str, Any] = {}
    if settings.get("compress", {}).get("format", "none") != "none":
        options["compress"] = paceline.Compression(**settings["compress"])
    if "bucket_cap_mb" in settings:
        options["reduction"] = paceline.Reduction(bucket_mib=settings["bucket_cap_mb"])
    if "local_steps" in settings:
        options["local_steps"] = paceline.LocalSteps(**settings["local_steps"])
    engine = paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=task.optimizer(model),
        clip_norm=task.clip_norm,
        schedule=task.lr_factor,
        **options,
    )

    def evaluate(batch: Batch) -> float:
        with engine.evaluating():
            return loss_of(engine.model, batch)

    plain = _all_reduced(model)
    every = settings.get("local_steps", {}).get("every", 1)

    def step(batch: Batch) -> float | None:
        result = engine.step(batch)
        # Between meetings asking would make this replica wait for the others.
        return result.loss if engine.steps_done % every == 0 else None

    def sent() -> float:
        traffic = engine.traffic()
        # Uncompressed gradients go DDP's own way, which is not counted.
        return plain * engine.steps_done if traffic is None else traffic.sent

    return Training(model, step, sent, evaluate)


def _ddp(settings: dict[str, Any], task: Task, device: torch.device) -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = task.model().to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=settings.get("bucket_cap_mb"))
    hook = settings.get("hook")
    if hook in ("fp16", "bf16"):
        wrapped.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
    elif hook is not None:
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=settings["rank"],
            start_powerSGD_iter=settings["first_step"],
        )
        kinds = {"power_sgd": powerSGD_hook.powerSGD_hook,
                 "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook}  # fmt: skip
        wrapped.register_comm_hook(state, kinds[hook])
    count = None if hook else _all_reduced(model)
    return _hand_written(wrapped, task, lambda loss: loss.backward(), count)


def _accelerate(settings: dict[str, Any], task: Task, device: torch.device) -> Training:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(
        bucket_cap_mb=settings.get("bucket_cap_mb", 25),
        comm_hook=DDPCommunicationHookType(settings["hook"]),
        comm_state_option={
            "matrix_approximation_rank": settings["rank"],
            "start_powerSGD_iter": settings["first_step"],
        },
    )
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[handler])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # Accelerate takes what it likes
    model = accelerator.prepare_model(task.model())
    return _hand_written(model, task, accelerator.backward)


def _hand_written(
    wrapped: nn.Module,
    task: Task,
    backward: Callable[[Tensor], Any],
    per_step: float | None = None,
) -> Training:
    """The loop that everybody writes; ``per_step`` is what is known to be sent, in bytes."""
    model: nn.Module = wrapped.module  # type: ignore[assignment]
    optimizer = task.optimizer(model)
    steps = 0

    def step(batch: Batch) -> float:
        nonlocal steps
        for group in optimizer.param_groups:
            group["lr"] = task.lr * task.lr_factor(steps)
        optimizer.zero_grad()
        loss = mean_loss(wrapped(batch[0]), batch[1])
        backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        steps += 1
        return loss.item()

    return Training(model, step, lambda: None if per_step is None else steps * per_step)


def _all_reduced(model: nn.Module) -> float:
    """Bytes that a rank sends in a ring all-reduce of all gradients."""
    size = dist.get_world_size()
    return sum(p.numel() * p.element_size() for p in model.parameters()) * 2 * (size - 1) / size
