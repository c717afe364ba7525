"""Data: the global order, the loader that walks it, and text that every machine has.

- ``make_loader``: the function ``loader``; ``torch_dataloader``: one made of a DataLoader.
- ``loader``: the class, its position and its state; ``batch_shares``: each rank's share of a batch.
- ``shuffle_order``: the order of an epoch, computed and never stored.
- ``map_dataset``, ``custom_sampler``, ``iterable_dataset``, ``rank_sharded_stream``: the kinds of
  source that samples are read from; ``sample_source`` is what they have in common.
- ``sharded_dataset``: many files as one dataset; ``shard_order``: the order they are read in;
  ``shard_files``, ``shard_formats``, ``tar_shards``, ``parquet_shards``: what they are;
  ``shard_index``: how many samples each has; ``shard_reader``: what is open.
- ``packed_tokens``, ``packing``: documents in files of tokens, as full sequences; ``mixture``:
  several datasets as one.
- ``rank_comparison``, ``fingerprints``: ranks compare what they read.
- ``randomness``: what samples draw, apart from what the model draws.
"""

from paceline.data.batch_shares import Share, share, steps_per_epoch
from paceline.data.loader import Loader
from paceline.data.make_loader import from_dataloader, loader
from paceline.data.mixture import Mixture, mixture
from paceline.data.packed_tokens import PackedSequence, PackedTokens
from paceline.data.sharded_dataset import ShardedDataset, shards
from paceline.data.shuffle_order import Order
from paceline.data.text import ByteText, stdlib_source, unigram_loss
from paceline.data.torch_dataloader import sizes_over

__all__ = [
    "ByteText",
    "Loader",
    "Mixture",
    "Order",
    "PackedSequence",
    "PackedTokens",
    "ShardedDataset",
    "Share",
    "from_dataloader",
    "loader",
    "mixture",
    "shards",
    "share",
    "sizes_over",
    "stdlib_source",
    "steps_per_epoch",
    "unigram_loss",
]
