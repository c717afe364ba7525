"""Saving the state of all ranks as one checkpoint, and loading it back at any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import Part, RankState
from paceline.checkpoint.sharded.dcp_errors import RanksFailed, run_dcp
from paceline.checkpoint.sharded.dcp_planner import PartsLoadPlanner, StateSavePlanner
from paceline.checkpoint.sharded.reader import PartsReader
from paceline.checkpoint.sharded.writer import StateWriter
from paceline.errors import CheckpointError


def save(
    folder: Folder,
    step: int,
    state: RankState,
    *,
    info: dict[str, Any],
    group: dist.ProcessGroup | None,
    read_back: bool = True,
    problem: str | None = None,
) -> Checkpoint:
    """Save what the ranks of ``group`` give as the checkpoint of ``step``. Called by all of them.

    ``group`` must be one that nothing else uses meanwhile, and move CPU tensors (Gloo); ``None``
    means that this process saves alone, whoever else there is. ``info`` is that of the group's
    first rank and must be fit for JSON.

    Each rank writes its own file, flushes it to disk and, unless ``read_back`` is false, reads it
    again and compares; then the first rank commits all of it by writing the manifest, unless it
    took the folder's lock and has lost it. Whatever happens before that leaves every earlier
    checkpoint as it was, also one of the same step.

    All ranks return, or all raise ``CheckpointError`` with the reason of the first rank that
    failed. ``problem`` is a reason this rank has to fail, so that the others do not wait for it.
    """
    return save_measured(
        folder, step, state, info=info, group=group, read_back=read_back, problem=problem
    )[0]


def save_measured(
    folder: Folder,
    step: int,
    state: RankState,
    *,
    info: dict[str, Any],
    group: dist.ProcessGroup | None,
    read_back: bool = True,
    problem: str | None = None,
) -> tuple[Checkpoint, int]:
    """Like ``save``; and how many bytes all ranks wrote, without reading the manifest."""
    if step < 0:
        raise CheckpointError(f"step {step}: steps are counted from 0.")
    checkpoint = folder.get(step)
    writer = StateWriter(checkpoint, step, info, read_back=read_back, check_lock=folder.check_lock)
    try:
        metadata = run_dcp(
            f"saving step {step} to {checkpoint.path}",
            dcp_save,
            group,
            state_dict={},
            storage_writer=writer,
            planner=StateSavePlanner(step, state, problem),
        )
    except RanksFailed:
        writer.abandon()
        raise
    return checkpoint, metadata.storage_data


def load(
    checkpoint: Checkpoint, parts: Mapping[str, Part], group: dist.ProcessGroup | None
) -> None:
    """Fill the memory of ``parts`` from ``checkpoint``. Called by all ranks of ``group``.

    The ranks may hold other boxes than those that saved, as many as they like, or none. Names,
    shapes and dtypes must be those that were saved. Every byte is checked before it counts: where
    this raises, what ``parts`` hold is undefined. All ranks return, or all raise
    ``CheckpointError`` with the reason of the first one that failed. For ``group`` see
    ``save``.
    """
    run_dcp(
        f"loading {checkpoint.path}",
        dcp_load,
        group,
        state_dict={},
        storage_reader=PartsReader(checkpoint),
        planner=PartsLoadPlanner(checkpoint, parts),
    )
