"""``deepspeed.pipe``: a model as a list of layers, trained in stages by ``train_batch``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.engine_names import SavedBelow
from paceline.checkpoint.restore import OpenedCheckpoint, fill, on_all_ranks
from paceline.compat.deepspeed.optimizing import make_optimizer, make_scheduler
from paceline.compat.deepspeed.saving import OWN, TaggedFolder
from paceline.config.deepspeed.settings import DeepSpeedSettings
from paceline.data import loader as make_loader
from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.errors import CheckpointError, DataError, TrainingError
from paceline.options import Pipelining, Recompute, Sharding
from paceline.world import World


class LayerSpec:
    """A layer that is built later: ``LayerSpec(nn.Linear, 10, 10)``."""

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(typename):
            raise TrainingError(f"LayerSpec({typename!r}): the first argument must be a class.")
        self.typename, self.module_args, self.module_kwargs = typename, args, kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is one and the same wherever its ``key`` stands."""

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipelineModule(nn.Module):
    """Layers in a row, each fed what the one before it gives.

    ``num_stages`` ranks hold a part of them each; the other ranks hold further copies. The cut is
    by ``partition_method``: ``parameters``, ``uniform`` (as many layers each), or ``type:NAME``.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Any = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: Any = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise TrainingError(
                f"PipelineModule({', '.join(unknown)}=…) is not supported. Leave it out."
            )
        if num_stages is None and topology is None:
            raise TrainingError("PipelineModule: num_stages= must say how many stages there are.")
        self.num_stages = _stages_of(num_stages, topology)
        self.loss_fn = loss_fn
        self.partition_method = partition_method.lower()
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.layers = nn.ModuleList()
        self.tied_modules = nn.ModuleDict()
        self._calls: list[Callable[[Any], Any]] = []
        self._names: list[str | None] = []
        for layer in layers:
            self._add(layer)
        if not self._calls:
            raise TrainingError("PipelineModule: there are no layers.")

    def _add(self, layer: Any) -> None:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            key, forward = layer.key, layer.forward_fn
            self._calls.append(
                (lambda x: self.tied_modules[key](x))
                if forward is None
                else (lambda x: forward(self.tied_modules[key], x))
            )
            self._names.append(f"tied_modules.{key}")
            return
        if isinstance(layer, LayerSpec):
            layer = layer.build()
        if isinstance(layer, nn.Module):
            index = len(self.layers)
            self.layers.append(layer)
            self._calls.append(lambda x: self.layers[index](x))
            self._names.append(f"layers.{index}")
        elif callable(layer):
            self._calls.append(layer)
            self._names.append(None)
        else:
            raise TrainingError(
                f"PipelineModule: a layer must be a module, a LayerSpec or a function; got "
                f"{type(layer).__name__}."
            )

    def forward(self, inputs: Any) -> Any:
        """All layers in a row."""
        for call in self._calls:
            inputs = call(inputs)
        return inputs

    def cuts(self) -> list[str] | None:
        """The layers that start a stage; ``None``: cut by the number of parameters."""
        if self.num_stages == 1 or self.partition_method in ("parameters", "best"):
            return None
        names = [name for name in self._names if name is not None]
        if self.partition_method.startswith("type:"):
            wanted = self.partition_method.removeprefix("type:")
            modules = dict(self.named_modules())
            names = [n for n in names if wanted in type(modules[n]).__name__.lower()]
        elif self.partition_method != "uniform":
            raise TrainingError(
                f"PipelineModule: partition_method={self.partition_method!r} must be 'parameters', "
                "'uniform' or 'type:NAME'."
            )
        if len(names) < self.num_stages:
            raise TrainingError(
                f"PipelineModule: {len(names)} layers cannot be cut into {self.num_stages} stages."
            )
        starts = [len(names) * stage // self.num_stages for stage in range(1, self.num_stages)]
        return [names[start] for start in starts]


class PipelineEngine(nn.Module):
    """Trains a ``PipelineModule`` by whole steps: ``train_batch``."""

    def __init__(
        self,
        model: PipelineModule,
        settings: DeepSpeedSettings,
        optimizer: Any,
        parameters: Any,
        lr_scheduler: Any,
    ) -> None:
        super().__init__()
        self.world = World.current()
        pp = model.num_stages
        if self.world.size % pp:
            raise TrainingError(
                f"PipelineModule(num_stages={pp}): {self.world.size} ranks cannot be shared by "
                f"pipelines of {pp}. Start a multiple of {pp}."
            )
        self.module, self.settings = model, settings
        self._batch = settings.batch.on(self.world.size // pp)
        made = make_optimizer(optimizer, model, parameters, settings)
        if made is None:
            raise TrainingError(
                "deepspeed.initialize: a pipeline needs an optimizer. Name one in the config, or "
                "pass optimizer=."
            )
        self.lr_scheduler = make_scheduler(lr_scheduler, made, settings)
        interval = model.activation_checkpoint_interval
        self._engine = Engine(
            model,
            loss=model.loss_fn,
            optimizer=made,
            layout=f"dp={self.world.size // pp},pp={pp},zero={settings.zero}",
            microbatch=self._batch.micro_batch,
            precision=settings.precision,
            clip_norm=settings.clip_norm,
            schedule=self.lr_scheduler,
            nonfinite="skip",
            sharding=Sharding(offload=settings.offload) if settings.zero else None,
            pipeline=Pipelining(cuts=model.cuts()),
            checkpoint_activations=Recompute(blocks="layers.*", every=interval)
            if interval
            else None,
        )
        self.optimizer = self._engine.optimizer
        self._data: Iterator[Any] | None = None
        self._norm: float | None = None
        self._files = TaggedFolder()

    def set_dataloader(self, loader: Any) -> None:
        """What ``train_batch`` reads without an iterator of its own."""
        self._data = iter(RepeatingLoader(loader))

    def read(self, dataset: Any, collate_fn: Any = None) -> Any:
        """A loader over ``dataset`` that gives this rank's micro-batches."""
        loader = make_loader(
            dataset,
            per_device_batch=self._batch.micro_batch,
            seed=0,
            drop_last=True,
            collate_fn=collate_fn,
            layout=self._engine.layout,
        )
        self.set_dataloader(loader)
        return loader

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step over ``gradient_accumulation_steps`` micro-batches; the mean loss."""
        result = self._engine.step(self._next(data_iter))
        self._norm = result.grad_norm
        return torch.tensor(result.loss, dtype=torch.float64)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        **_: Any,
    ) -> Any:
        """The mean loss of a step's micro-batches, without training."""
        batch = self._next(data_iter)
        if not compute_loss:
            return self._engine.predict(batch)
        sums = torch.zeros(2, dtype=torch.float64)
        with self._engine.evaluating():
            for part in self._engine.evaluate(batch):
                sums += torch.tensor([float(part.term.total), float(part.term.count)])
            if self.world.size > 1:
                sums = sums.to(self.world.device)
                dist.all_reduce(sums)
            loss = (sums[0] / sums[1]).cpu()
            return (loss, self._engine.predict(batch)) if return_logits else loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not of a pipeline."""
        raise TrainingError(
            "engine(...): a pipeline is driven by whole steps. Call engine.train_batch() or "
            "engine.eval_batch()."
        )

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Save everything as ``save_dir/tag``; every rank calls it."""
        self._engine.settle()
        state = internals_of(self._engine).rank_state.collect()
        own = {"client_state": client_state or {}}
        self._files.save(save_dir, tag, self.global_steps, state, own, latest=save_latest)
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | int | None = None
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from ``load_dir/tag``, or the latest save, at any number of stages and ranks."""
        found = self._files.find(load_dir, tag)
        if found is None:
            return None, None
        path, checkpoint = found
        if checkpoint is None:
            raise CheckpointError(
                f"{path} holds no checkpoint of Paceline's, and a pipeline takes no other."
            )
        opened = on_all_ranks(lambda: OpenedCheckpoint(checkpoint, lambda name: True))
        saved = SavedBelow(opened, "")
        load = saved.load_by(functools.partial(fill, self.world, checkpoint))
        internals_of(self._engine).rank_state.take(saved, load)
        return str(path), opened.read_object(OWN)["client_state"]

    @property
    def data_parallel_rank(self) -> int:
        """Which of the pipelines this rank is part of."""
        return self._engine.coordinate.dp

    def _next(self, data_iter: Iterator[Any] | None) -> Any:
        source = self._data if data_iter is None else data_iter
        if source is None:
            raise DataError(
                "train_batch: there is no data. Pass data_iter=, or training_data= to initialize()."
            )
        parts = list(islice(source, self.gradient_accumulation_steps()))
        if len(parts) < self.gradient_accumulation_steps():
            raise DataError(
                f"train_batch: the iterator gave {len(parts)} of "
                f"{self.gradient_accumulation_steps()} micro-batches of a step. Wrap its loader in "
                "deepspeed.utils.RepeatingLoader."
            )
        return tuple(_joined([part[i] for part in parts]) for i in range(len(parts[0])))

    @property
    def global_steps(self) -> int:
        """How many steps were done."""
        return self._engine.steps_done

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    @property
    def global_rank(self) -> int:
        """The rank among all."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """The rank on this machine."""
        return self.world.local_rank

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first stage."""
        return self._engine.coordinate.pp == 0

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._engine.coordinate.pp == self.module.num_stages - 1

    def train_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self._batch.train_batch_size or 0

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch."""
        return self._batch.micro_batch or 0

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._batch.accumulation or 1

    def get_lr(self) -> list[float]:
        """The learning rate of every group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradient, before it was clipped."""
        return self._norm

    def __getattr__(self, name: str) -> Any:
        if name in ("backward", "step"):
            raise AttributeError(
                f"engine.{name}: a pipeline is driven by whole steps. Call engine.train_batch()."
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"engine.{name}: a pipeline's engine does not have it. What there is, is in "
                "docs/guides/deepspeed.md; for more, use paceline.Engine(layout='pp=2')."
            ) from None


class RepeatingLoader:
    """A loader that begins again when it is through."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._current: Iterator[Any] | None = None

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        if self._current is None:
            self._current = iter(self.loader)
        try:
            return next(self._current)
        except StopIteration:
            self._current = iter(self.loader)
            return next(self._current)


class PipeDataParallelTopology:
    """So many stages, each in so many copies."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        self.num_pp, self.num_dp, self.num_mp = num_pp, num_dp, 1


class PipeModelDataParallelTopology(PipeDataParallelTopology):
    """The same with tensor parallelism, of which there is none in a ``PipelineModule``."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        if num_mp != 1:
            raise TrainingError(
                f"PipeModelDataParallelTopology(num_mp={num_mp}): layers of a PipelineModule are "
                "whole on their rank. Use paceline.Engine(layout='pp=2,tp=2')."
            )
        super().__init__(num_pp, num_dp)


def _stages_of(num_stages: int | None, topology: Any) -> int:
    named = getattr(topology, "num_pp", None)
    if topology is not None and named is None:
        raise TrainingError(
            f"PipelineModule(topology={type(topology).__name__}): use PipeDataParallelTopology, or "
            "num_stages=."
        )
    stages = num_stages if num_stages is not None else named
    if not isinstance(stages, int) or stages < 1:
        raise TrainingError(f"PipelineModule: num_stages={stages!r} must be 1 or more.")
    return stages


def _joined(parts: list[Any]) -> Any:
    """The same part of several micro-batches as one."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], tuple | list):
        return tuple(_joined([part[i] for part in parts]) for i in range(len(parts[0])))
    raise DataError(f"train_batch: a batch must hold tensors; got {type(parts[0]).__name__}.")
