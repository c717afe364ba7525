"""torch's flight recorder: which collectives this rank began, and which of them are over.

The recorder is a ring of fixed size in which every backend notes its calls; it must be given a size
(:func:`switch_on`) before the first process group is made. Reading it is a private function of
torch, called here and nowhere else (torch 2.11 to 2.13; ``tests/diagnose/test_flight.py`` tells
when it changes). Point-to-point calls are in it with NCCL only.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.diagnose.report import Call, Place

SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
_SIZE = 256

# The recorder writes C++ names.
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def switch_on(environ: MutableMapping[str, str] | None = None) -> None:
    """Have torch record collectives, unless the user has set how many (0: none)."""
    env = os.environ if environ is None else environ
    env.setdefault(SIZE_VARIABLE, str(_SIZE))


def places() -> tuple[Place, ...]:
    """How far this rank is in each of its groups; takes some 0.05 ms, more after a new group."""
    found = []
    for backend, dump in _recorders():
        status = pickle.loads(dump(includeCollectives=False)).get("pg_status", {})
        if any((backend, local) not in _groups for local in status):
            _learn_groups()
        for local, numbers in status.items():
            name, ranks = _groups.get((backend, local), ("", ()))
            if not ranks:
                continue  # of a group that has been destroyed
            found.append(
                Place(
                    backend=backend,
                    group=name,
                    ranks=ranks,
                    begun=max(0, numbers["last_enqueued_collective"]),
                    done=max(0, numbers["last_completed_collective"]),
                )
            )
    return tuple(found)


# The recorder counts groups by a number of this process's own; their names, which are the same on
# all members, are in its entries alone.
_groups: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}


def _learn_groups() -> None:
    for backend, dump in _recorders():
        for entry in pickle.loads(dump(includeStackTraces=False)).get("entries", []):
            _known_ranks(backend, entry)


def calls() -> tuple[Call, ...]:
    """The collectives the recorder still holds, oldest first; takes some milliseconds.

    Without the stacks of the calls: writing those out takes seconds while another thread computes.
    """
    found = []
    for _, dump in _recorders():
        entries = pickle.loads(dump(includeStackTraces=False)).get("entries", [])
        own = [_call(entry) for entry in entries if not entry["is_p2p"]]
        found += [call for call in own if call.ranks]
    return tuple(found)


def _recorders() -> list[tuple[str, Callable[..., bytes]]]:
    """One of NCCL's own where torch has NCCL, and one of all other backends."""
    c10d: Any = torch._C._distributed_c10d
    found = [("gloo", c10d._dump_fr_trace)] if hasattr(c10d, "_dump_fr_trace") else []
    if hasattr(c10d, "_dump_nccl_trace"):
        found.append(("nccl", c10d._dump_nccl_trace))
    return found


def _call(entry: dict[str, Any]) -> Call:
    backend, _, op = entry["profiling_name"].partition(":")
    name = entry["process_group"][0]
    return Call(
        backend=backend,
        group=name,
        ranks=_known_ranks(backend, entry),
        number=entry["collective_seq_id"],
        op=op,
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        dtypes=tuple(_DTYPES.get(name, name) for name in entry["input_dtypes"]),
        done=bool(entry["retired"]) or entry["state"] == "completed",
    )


def _known_ranks(backend: str, entry: dict[str, Any]) -> tuple[int, ...]:
    local, name = str(entry["pg_id"]), entry["process_group"][0]
    if (backend, local) not in _groups:
        _groups[backend, local] = (name, _ranks_of(name))
    return _groups[backend, local][1]


def _ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of the group of that name; none when it is gone.

    Only the way from the name to the group is private: the recorder knows names alone.
    """
    try:
        resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        return tuple(dist.get_process_group_ranks(resolve(name)))
    except (RuntimeError, ValueError, KeyError):
        return ()
