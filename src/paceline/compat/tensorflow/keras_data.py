"""What ``TensorFlowTrainer`` trains on: arrays, datasets of samples, and ``tf.data``.

Arrays and datasets of samples are read in Paceline's own order, a function of seed and position, so
that a run that goes on takes up the very next batch on any number of workers. A ``tf.data.Dataset``
has an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.compat.tensorflow.library import import_tensorflow
from paceline.data.batch_shares import share, steps_per_epoch
from paceline.data.shuffle_order import Order
from paceline.errors import DataError


class IndexedData:
    """Data whose samples can be taken by their numbers."""

    def __init__(
        self,
        source: ArraySource | SampleSource,
        *,
        seed: int,
        shuffle: bool,
        global_batch: int,
        drop_last: bool,
    ) -> None:
        self.source, self.global_batch, self.drop_last = source, global_batch, drop_last
        self.samples: int | None = len(source)
        self._order = Order(len(source), seed, shuffle)
        self.steps: int | None = steps_per_epoch(len(source), global_batch, drop_last)
        if not self.steps:
            raise DataError(
                f"{len(source)} samples do not make one batch of global_batch={global_batch}, and "
                "drop_last leaves out a short one. Take a smaller global_batch."
            )

    def samples_of(self, step: int) -> int:
        """How many samples the batch of a step (from 0) has."""
        assert self.samples is not None
        assert self.steps is not None
        first = step % self.steps * self.global_batch
        return min(self.global_batch, self.samples - first)

    def training(self, strategy: Any, first: int, stop: int) -> Any:
        """The batches of the steps ``first`` to ``stop`` (excluded), over all epochs.

        A short batch that does not divide among the replicas is filled up with samples of weight 0,
        and the others weigh more: the mean loss is that of the samples it has, on any strategy.
        """
        assert self.steps is not None
        replicas = strategy.num_replicas_in_sync
        short = self.samples_of(self.steps - 1)
        is_weighted = bool(short % replicas)

        def part(step: int, replica: int) -> tuple[Any, Any]:
            assert self.steps is not None
            epoch, at = divmod(step, self.steps)
            count, start = self.samples_of(step), at * self.global_batch
            each = -(-count // replicas)
            places = np.arange(replica * each, (replica + 1) * each)
            weights = np.where(places < count, each * replicas / count, 0.0).astype(np.float32)
            indices = self._indices(epoch, start + places % count)
            return indices, weights if is_weighted else None

        return self._distributed(strategy, range(first, stop), part)

    def evaluation(self, strategy: Any) -> tuple[Any, int]:
        """All samples in their order, each once, and in how many batches."""
        replicas = strategy.num_replicas_in_sync
        assert self.samples is not None
        if self.samples < replicas:
            raise DataError(
                f"{self.samples} samples cannot be evaluated on {replicas} replicas: each needs "
                "one. Evaluate on fewer workers."
            )
        bounds = [*range(0, self.samples, self.global_batch), self.samples]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] < replicas:
            del bounds[-2]  # too short for all replicas: it goes with the one before

        def part(step: int, replica: int) -> tuple[Any, Any]:
            first, stop = share(bounds[step + 1] - bounds[step], replica, replicas)
            return np.arange(bounds[step] + first, bounds[step] + stop), None

        steps = len(bounds) - 1
        # Without end: Keras 3 goes on with one iterator from evaluation to evaluation.
        return self._distributed(strategy, range(steps), part, repeat=True), steps

    def first_batch(self) -> Any:
        """One sample as a batch, to build a model by."""
        return self.source.take(np.zeros(1, dtype=np.int64))

    def _indices(self, epoch: int, positions: Any) -> Any:
        import torch

        return self._order.at(epoch, torch.from_numpy(positions)).numpy()

    def _distributed(
        self,
        strategy: Any,
        steps: range,
        part: Callable[[int, int], tuple[Any, Any]],
        *,
        repeat: bool = False,
    ) -> Any:
        """A dataset of each worker's own parts: nobody reads what another trains on."""
        tf = import_tensorflow()
        total = strategy.num_replicas_in_sync

        def read(replicas: range) -> Iterator[Any]:
            for step in steps:
                for replica in replicas:
                    indices, weights = part(step, replica)
                    yield self.source.batch(indices, weights)

        def make(context: Any) -> Any:
            own = total if context is None else total // context.num_input_pipelines
            first = 0 if context is None else context.input_pipeline_id * own
            like = self.source.batch(*part(steps.start, first))
            signature = tf.nest.map_structure(
                lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), like
            )
            replicas = range(first, first + own)
            found = tf.data.Dataset.from_generator(
                lambda: read(replicas), output_signature=signature
            )
            return (found.repeat() if repeat else found).prefetch(2)

        if type(strategy).__name__ == "_DefaultDistributionStrategy":
            return make(None)
        return strategy.distribute_datasets_from_function(make)


class ArraySource:
    """Arrays whose first dimension counts the samples: ``x``, ``(x, y)`` or ``(x, y, weights)``."""

    def __init__(self, arrays: Any, name: str) -> None:
        tf = import_tensorflow()
        self._map = tf.nest.map_structure
        self.arrays = self._map(as_array, tuple(arrays) if isinstance(arrays, list) else arrays)
        lengths = {len(array) for array in tf.nest.flatten(self.arrays)}
        if len(lengths) != 1:
            raise DataError(
                f"{name}: the arrays have {', '.join(map(str, sorted(lengths)))} samples; all must "
                "have the same number."
            )
        [self._length] = lengths

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Any) -> Any:
        """The samples of these numbers."""
        return self._map(lambda array: array[indices], self.arrays)

    def batch(self, indices: Any, weights: Any) -> Any:
        """The same as ``fit`` takes it, weighted."""
        return _weighted(self.take(indices), weights)


class SampleSource:
    """A dataset with ``len()`` and ``[index]``, such as torch's; its samples are stacked."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._map = import_tensorflow().nest.map_structure

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: Any) -> Any:
        """The samples of these numbers, stacked."""
        samples = [_plain(self._dataset[int(index)]) for index in indices]
        return self._map(
            lambda *parts: as_array(np.stack([np.asarray(p) for p in parts])), *samples
        )

    def batch(self, indices: Any, weights: Any) -> Any:
        """The same as ``fit`` takes it, weighted."""
        return _weighted(self.take(indices), weights)


def _plain(sample: Any) -> Any:
    return tuple(sample) if isinstance(sample, list) else sample


def _weighted(batch: Any, weights: Any) -> Any:
    if not isinstance(batch, tuple):
        batch = (batch,)
    if weights is None:
        return batch
    x, y, *given = (*batch, None)[: max(2, len(batch))]
    return (x, y, weights * given[0] if given else weights)


def as_array(value: Any) -> Any:
    """A NumPy array; floats in Keras' own precision, as its ``fit`` has them."""
    array = np.asarray(value)
    if array.ndim == 0:
        array = array[None]
    return array.astype(np.float32) if array.dtype == np.float64 else array


@dataclass
class TfData:
    """A ``tf.data.Dataset`` of batches; its batch is the global one."""

    dataset: Any
    global_batch: int
    steps: int | None
    """Batches of an epoch; ``None`` where it has no end."""
    samples: int | None = None

    def samples_of(self, step: int) -> int:
        """The batch size; a last, short batch is not known to be one."""
        return self.global_batch

    def training(self, strategy: Any, first: int, stop: int) -> Any:
        """The dataset from the batch ``first`` of its epoch on."""
        at = first % self.steps if self.steps else first
        return self.dataset.skip(at) if at else self.dataset

    def evaluation(self, strategy: Any) -> tuple[Any, int | None]:
        """The dataset as it is."""
        return self.dataset, None

    def first_batch(self) -> Any:
        """One batch, to build a model by."""
        return next(iter(self.dataset.take(1)))


Data = IndexedData | TfData


def make_data(
    given: Any,
    name: str,
    *,
    global_batch: int | None,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    default_batch: int | None = None,
) -> Data:
    """The data that ``given`` is, or that it returns where it is a function.

    ``default_batch`` is for samples of which nobody has said how many make a batch.
    """
    tf = import_tensorflow()
    if callable(given) and not isinstance(given, tf.data.Dataset):
        given = given()
    if isinstance(given, tf.data.Dataset):
        return _tf_data(tf, given, name, global_batch)
    source = _source(tf, given, name)
    global_batch = default_batch if global_batch is None else global_batch
    if global_batch is None:
        raise DataError(
            f"{name} is {len(source)} samples, and how many of them make a step was not said. Give "
            "TensorFlowTrainer(global_batch=32): samples of a step over all workers."
        )
    return IndexedData(
        source, seed=seed, shuffle=shuffle, global_batch=global_batch, drop_last=drop_last
    )


def _source(tf: Any, given: Any, name: str) -> ArraySource | SampleSource:
    kinds = {kind.__name__ for kind in type(given).__mro__}
    if kinds & {"PyDataset", "Sequence", "DataLoader"} or not hasattr(given, "__len__"):
        raise DataError(
            f"{name} is a {type(given).__name__}; it must be NumPy arrays such as (x, y), a "
            "tf.data.Dataset of batches, a dataset with len() and [index] that gives single "
            "samples, or a function that returns one of them."
        )
    leaves = tf.nest.flatten(given) if isinstance(given, tuple | list | dict) else [given]
    if all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        return ArraySource(given, name)
    if isinstance(given, dict) or not hasattr(given, "__getitem__"):
        raise DataError(
            f"{name}: a {type(given).__name__} of {type(leaves[0]).__name__} is no data."
        )
    return SampleSource(given)


def _tf_data(tf: Any, dataset: Any, name: str, global_batch: int | None) -> TfData:
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    first = shapes[0][0] if shapes and shapes[0].rank else None
    is_batched = bool(shapes) and all(s.rank and s[0] in (None, first) for s in shapes)
    if global_batch is not None and not (is_batched and first in (None, global_batch)):
        dataset, first = dataset.batch(global_batch), global_batch
    if global_batch is None or first is None:
        first = first or int(tf.nest.flatten(next(iter(dataset.take(1))))[0].shape[0])
    if global_batch is not None and first != global_batch:
        raise DataError(
            f"{name} has batches of {first}, but global_batch={global_batch}. The batch of a "
            "tf.data.Dataset is the global one: leave global_batch out, or make them agree."
        )
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy
    if dataset.options().experimental_distribute.auto_shard_policy is policy.AUTO:
        options.experimental_distribute.auto_shard_policy = policy.DATA
    dataset = dataset.with_options(options)
    steps = int(dataset.cardinality())
    if steps == tf.data.UNKNOWN_CARDINALITY:  # it is read through once, to know its epochs
        steps = int(dataset.reduce(np.int64(0), lambda count, *_: count + 1))
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    if steps == 0:
        raise DataError(f"{name} is an empty tf.data.Dataset.")
    return TfData(dataset, first, steps if steps > 0 else None)
