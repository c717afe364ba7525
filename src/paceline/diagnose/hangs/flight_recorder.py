"""torch's flight recorder: which collectives this rank began, and which of them are over.

The recorder is a ring of fixed size in which every backend notes its calls; it must be given a size
(``switch_on``) before the first process group is made. Reading it is a private function of
torch, called here and nowhere else (torch 2.11 to 2.13; ``tests/diagnose/test_flight_recorder.py``
tells when it changes). Point-to-point calls are in it with NCCL only.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.diagnose.hangs.rank_heartbeat import Call, GroupKey, GroupProgress, PointToPoint
from paceline.launch.environment import COLLECTIVES_REMEMBERED, FLIGHT_RECORDER

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
    env.setdefault(FLIGHT_RECORDER, str(COLLECTIVES_REMEMBERED))


def group_progress() -> tuple[GroupProgress, ...]:
    """How far this rank is in each of its groups; takes some 0.05 ms, more after a new group."""
    found: dict[GroupKey, GroupProgress] = {}
    for recorder, dump in _recorders():
        status = pickle.loads(dump(includeCollectives=False)).get("pg_status", {})
        if any((recorder, local) not in _groups for local in status):
            _entries(recorder, dump)
        for local, numbers in sorted(status.items(), key=lambda item: int(item[0])):
            # None: of a group that was destroyed before anybody looked. Not looked for again.
            key = _groups.setdefault((recorder, local), None)
            if key is not None and key[2]:
                begun, done = numbers["last_enqueued_collective"], numbers[_DONE]
                # A later group of the same name, of a world joined after the first, replaces it.
                found[key] = GroupProgress(*key, begun=max(0, begun), done=max(0, done))
    return tuple(found.values())


_DONE = "last_completed_collective"
# The recorder counts groups by a number of this process's own; their names, which are the same on
# all members, are in its entries alone.
_groups: dict[tuple[str, str], GroupKey | None] = {}


def calls() -> tuple[Call, ...]:
    """The collectives the recorder still holds, each group's in order; takes some milliseconds.

    Without the stacks of the calls: writing those out takes seconds while another thread computes.
    """
    found: dict[GroupKey, dict[int, Call]] = {}
    newest: dict[GroupKey, int] = {}
    for recorder, dump in _recorders():
        for entry in _entries(recorder, dump):
            call = _call(recorder, entry)
            if entry["is_p2p"] or not call.ranks:
                continue
            if entry["pg_id"] > newest.get(call.key, -1):
                newest[call.key], found[call.key] = entry["pg_id"], {}
            if entry["pg_id"] == newest[call.key]:
                found[call.key][call.number] = call
    return tuple(call for own in found.values() for call in own.values())


class IssuedCall(NamedTuple):
    """A collective with the moment (nanoseconds since the epoch) at which it was begun."""

    time: int
    call: Call
    where: tuple[str, ...]
    """The Python stack as ``file:line in function``, innermost first."""


def issued_calls(since: int) -> list[IssuedCall]:
    """Every collective that was begun after ``since``, in order. Slow: with stacks.

    Of groups that are still there, and as far as the recorder reaches back.
    """
    found = []
    for recorder, dump in _recorders():
        for entry in _entries(recorder, dump, stacks=True):
            if entry["time_created_ns"] < since or entry["is_p2p"]:
                continue
            where = [f"{f['filename']}:{f['line']} in {f['name']}" for f in entry["frames"]]
            call = _call(recorder, entry)
            found.append(IssuedCall(entry["time_created_ns"], call, tuple(where)))
    return sorted(found, key=lambda issued: issued.time)


def open_message() -> PointToPoint | None:
    """The first message on record that is under way; over Gloo there are none on record.

    NCCL's messages do not make the host wait, so that a stack does not show them.
    """
    for recorder, dump in _recorders():
        if (found := first_open_message(_entries(recorder, dump), _ranks_of)) is not None:
            return found
    return None


def first_open_message(
    entries: Iterable[dict[str, Any]], ranks_of: Callable[[str], tuple[int, ...]]
) -> PointToPoint | None:
    """The first message among the recorder's entries that is not over.

    A batch is over as a whole: only the entry that ends it is marked, which counts as no message.
    """
    batches: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["is_p2p"] or _backend_and_op(entry)[1] == "coalesced":
            batches.setdefault((entry["pg_id"], entry["p2p_seq_id"]), []).append(entry)
    for batch in batches.values():
        if any(entry["retired"] or entry["state"] == "completed" for entry in batch):
            continue
        named = [m for e in batch if (m := _MESSAGE.search(e["profiling_name"])) is not None]
        # Of a batch, what it receives tells whom it waits for.
        for match in sorted(named, key=lambda match: match["op"] != "recv"):
            ranks = ranks_of(batch[0]["process_group"][0])
            peer = int(match["peer"])
            return PointToPoint(match["op"], ranks[peer] if peer < len(ranks) else None)
    return None


_MESSAGE = re.compile(r":(?P<op>send|recv) \d+(->|<-)(?P<peer>\d+)$")


def _recorders() -> list[tuple[str, Callable[..., bytes]]]:
    """One of NCCL's own where torch has NCCL, and one of all other backends.

    What a recorder holds is told by its entries: in some versions the second holds NCCL's, too.
    """
    c10d: Any = torch._C._distributed_c10d
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    return [(name, getattr(c10d, name)) for name in names if hasattr(c10d, name)]


def _entries(
    recorder: str, dump: Callable[..., bytes], *, stacks: bool = False
) -> list[dict[str, Any]]:
    """The entries of a recorder; notes which groups they are of."""
    read = pickle.loads(dump(includeStackTraces=stacks))
    entries: list[dict[str, Any]] = read.get("entries", [])
    for entry in entries:
        place = (recorder, str(entry["pg_id"]))
        if _groups.get(place) is None:
            name = entry["process_group"][0]
            _groups[place] = (_backend_and_op(entry)[0], name, _ranks_of(name))
    return entries


def _call(recorder: str, entry: dict[str, Any]) -> Call:
    key = _groups[recorder, str(entry["pg_id"])]
    assert key is not None
    return Call(
        *key,
        number=entry["collective_seq_id"],
        op=_backend_and_op(entry)[1],
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        dtypes=tuple(_DTYPES.get(name, name) for name in entry["input_dtypes"]),
        done=bool(entry["retired"]) or entry["state"] == "completed",
    )


def _backend_and_op(entry: dict[str, Any]) -> tuple[str, str]:
    backend, _, op = entry["profiling_name"].partition(":")
    return backend, op


def _ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of the group of that name; none when it is gone.

    Only the way from the name to the group is private: the recorder knows names alone.
    """
    try:
        resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        return tuple(dist.get_process_group_ranks(resolve(name)))
    except (RuntimeError, ValueError, KeyError):
        return ()
