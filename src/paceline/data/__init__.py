"""Data: the global order, the loader that walks it, and text that every machine has."""

from paceline.data.batch_shares import Share, share, steps_per_epoch
from paceline.data.loader import Loader
from paceline.data.make_loader import loader
from paceline.data.shuffle_order import Order
from paceline.data.text import ByteText, stdlib_source, unigram_loss
from paceline.data.torch_dataloader import from_dataloader, sizes_over

__all__ = [
    "ByteText",
    "Loader",
    "Order",
    "Share",
    "from_dataloader",
    "loader",
    "share",
    "sizes_over",
    "stdlib_source",
    "steps_per_epoch",
    "unigram_loss",
]
