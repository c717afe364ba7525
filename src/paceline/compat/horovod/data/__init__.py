"""Loaders that read ahead, in Horovod's words."""

from __future__ import annotations

from paceline.compat.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
