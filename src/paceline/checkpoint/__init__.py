"""Saving, checking and loading the state of a run; each name is loaded when it is first used.

Commands that only look at checkpoints must not wait for torch.

- ``checkpoints``: the public class that saves an engine and restores it; ``saveable``: what it asks
  of one.
- ``checkpoint``: one checkpoint; ``folder``: those of a run; ``locate``: from a path or URL there;
  ``listing``, ``pruning``, ``retention``, ``best``, ``diff``.
- ``manifest``: the file that says what a checkpoint holds; ``hashing``: digests and keys;
  ``block_reader``: bytes that are checked as they are read.
- ``rank_state``, ``boxes``: which part of each tensor a rank holds; ``restore``, ``restore_order``.
- ``sharded/``: all ranks save and load together, on torch.distributed.checkpoint.
- ``memory/``: the copy in shared memory, on this node and a partner's.
- ``storage/``: local folders and object stores, and the lock on them.
- ``weights/``: import and export for other programs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint.checkpoint import Checkpoint as Checkpoint
    from paceline.checkpoint.checkpoints import Checkpoints as Checkpoints
    from paceline.checkpoint.diff import diff_checkpoints as diff_checkpoints
    from paceline.checkpoint.folder import Folder as Folder
    from paceline.checkpoint.listing import list_checkpoints as list_checkpoints
    from paceline.checkpoint.locate import find_checkpoint as find_checkpoint
    from paceline.checkpoint.locate import find_folder as find_folder
    from paceline.checkpoint.weights.export import export_hf as export_hf
    from paceline.checkpoint.weights.export import export_safetensors as export_safetensors
    from paceline.checkpoint.weights.export import export_torch as export_torch
    from paceline.checkpoint.weights.import_weights import import_weights as import_weights

_HOME = {
    "Checkpoint": "checkpoint",
    "Checkpoints": "checkpoints",
    "Folder": "folder",
    "diff_checkpoints": "diff",
    "export_hf": "weights.export",
    "export_safetensors": "weights.export",
    "export_torch": "weights.export",
    "find_checkpoint": "locate",
    "find_folder": "locate",
    "import_weights": "weights.import_weights",
    "list_checkpoints": "listing",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"paceline.checkpoint.{_HOME[name]}"), name)
    globals()[name] = value
    return value
