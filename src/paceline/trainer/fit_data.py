"""The data of ``fit``: its loaders, and the sizes of its batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import Loader, loader, sizes_over
from paceline.errors import DataError
from paceline.layout.batch import BatchSizes
from paceline.options import EngineOptions
from paceline.options.rules import layout_in_world
from paceline.trainer.base import TrainerBase
from paceline.world import World


def make_loader(trainer: TrainerBase, data: Any, name: str) -> Loader:
    """The loader of ``data``, by the ``name`` of what it is for.

    That is ``train`` or ``val`` of ``fit``, or the verb ``evaluate`` or ``predict``.
    """
    training = name == "train"
    if isinstance(data, Loader):
        data.follow(trainer.engine.layout)
        return data
    stated = trainer.batch.stated()
    if trainer.global_batch is not None:
        stated["accumulate"] = None  # it is the engine's, then: the batch is stated
    options = trainer.data
    if isinstance(data, DataLoader):
        streamed = isinstance(data.dataset, IterableDataset)
        return loader(
            data,
            **stated,
            seed=trainer.seed,
            layout=trainer.engine.layout,
            sharded_by_rank=options.sharded_by_rank and (training or streamed),
            compare=options.compare,
        )
    check_batch_is_stated(trainer.batch, data, name)
    if (ready := _like_ready_batches(data)) and trainer.engine.world.rank == 0:
        logging.getLogger("paceline").warning(ready)
    streamed = not hasattr(data, "__getitem__")
    return loader(
        data,
        **stated,
        seed=trainer.seed,
        shuffle=options.shuffle if training else False,
        drop_last=options.drop_last and training,
        workers=options.workers,
        pin_memory=options.pin_memory,
        collate_fn=options.collate_fn,
        layout=trainer.engine.layout,
        sharded_by_rank=options.sharded_by_rank and (training or streamed),
        compare=options.compare,
    )


def check_batch_is_stated(batch: BatchSizes, data: Any, name: str) -> None:
    """Refuse data that has no batch size of its own where nobody gave one."""
    if data is None or isinstance(data, Loader | DataLoader) or batch.says_global:
        return
    where = f"fit({name}=…)" if name in ("train", "val") else f"{name}()"
    raise DataError(
        f"{where} got a {type(data).__name__}: pass global_batch= to the Trainer, "
        "the samples per optimizer step over all ranks, or per_device_batch=, those that "
        "one rank puts through the model at once. Where its items are ready batches, wrap it: "
        "torch.utils.data.DataLoader(data, batch_size=None)."
    )


def _like_ready_batches(data: Any) -> str:
    """What to say of a list whose items look like ready batches, and are read as samples.

    Such an item has tensors with the same first dimension, one of them with further ones. A sample
    can be like that too, as a sequence with a label for each place is: so nothing is refused.
    """
    if not isinstance(data, list | tuple) or not data:
        return ""
    shapes = [_shapes_of(data[place]) for place in {0, len(data) // 2, len(data) - 1}]
    sizes = [{shape[0] for shape in found} for found in shapes]
    if any(len(found) != 1 or max(found) < 2 for found in sizes):
        return ""
    if any(len(found) < 2 or max(map(len, found)) < 2 for found in shapes):
        return ""
    first = " and ".join(str(list(shape)) for shape in _shapes_of(data[0]))
    return (
        f"The {len(data)} items of the list are read as samples, with tensors of {first}. Where "
        "they are ready batches, wrap it: torch.utils.data.DataLoader(data, batch_size=None)."
    )


def _shapes_of(item: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors and arrays in ``item``; empty where something else is in it."""
    parts = list(item.values()) if isinstance(item, Mapping) else item
    if not isinstance(parts, list | tuple) or not all(map(_is_column, parts)):
        return []
    return [tuple(part.shape) for part in parts]


def check_data(train: Any, val: Any) -> None:
    """Refuse what other libraries' ``fit`` takes first: a model, or columns of inputs and targets.

    A tuple of columns would be read as a dataset of as many samples as there are columns.
    """
    if isinstance(train, nn.Module):
        raise DataError(
            f"fit({type(train).__name__}, …): the model belongs to the Trainer, and fit takes the "
            "data: paceline.Trainer(model, ...).fit(train, val, epochs=3)."
        )
    both = _is_column(train) and _is_column(val) and len(train) == len(val)
    if both and tuple(train.shape[1:]) != tuple(val.shape[1:]):
        raise DataError(_COLUMNS.format(how="(x, y)"))
    for name, data in (("train", train), ("val", val)):
        columns = isinstance(data, tuple) and len(data) > 1 and all(map(_is_column, data))
        if columns and len({len(column) for column in data}) == 1:
            raise DataError(_COLUMNS.format(how=f"({name}=(x, y))"))


_COLUMNS = (
    "fit{how}: inputs and targets as columns are one dataset: "
    "trainer.fit(torch.utils.data.TensorDataset(x, y), epochs=3), with torch.from_numpy for arrays."
    " Samples that each are a tensor go into a list."
)


def _is_column(data: Any) -> bool:
    """Whether it is a tensor or an array with a first dimension."""
    shape = getattr(data, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0 and hasattr(data, "dtype")


def engine_options(
    trainer: TrainerBase, train: Any, world: World, *, goes_on: bool, verb: str = "fit"
) -> EngineOptions:
    """The options of the engine, with the bound on a pass that the sizes of a batch come to.

    ``train`` is what the engine will see, be it by ``fit`` or by another ``verb``.
    """
    if verb != "fit":
        check_batch_is_stated(trainer.batch, train, verb)
    options = trainer.engine_options
    layout = layout_in_world(options, world.size)
    if isinstance(train, Loader):
        if trainer.batch.per_device_batch is not None or trainer.batch.accumulate is not None:
            raise DataError(
                "fit(train=Loader): the Loader has its own batch. Say per_device_batch and "
                "accumulate to paceline.loader(...), not to the Trainer."
            )
        train.follow(layout)
        micro = train.microbatch
    else:
        micro = sizes_over(train, trainer.batch).on(layout.dp, exact=not goes_on).microbatch
    if micro is None:
        return options
    BatchSizes(per_device_batch=micro, microbatch=options.microbatch)  # they agree
    return replace(options, microbatch=micro)


def expect_all_ranks(*loaders: Loader | None, alone: bool) -> None:
    """All ranks read these loaders; those that train ``alone`` wait for each other less often."""
    for each in loaders:
        if each is not None:
            each.expect_all_ranks(every_batch=not alone)


def total_steps(train: Loader, epochs: int | None, steps: int | None) -> int | None:
    """How many steps a run has; ``None`` where the data does not say."""
    if steps is not None:
        return steps
    assert epochs is not None
    return None if train.steps_per_epoch is None else epochs * train.steps_per_epoch
