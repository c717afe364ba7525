"""Objects between ranks are unpickled only when a rank of the same world has sent them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import collectives
from paceline.errors import WorldError
from paceline.world import objects, sealing
from paceline.world.world import World


class Payload:
    """What a stranger would like to have executed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("signature", [b"", b"\0" * 32, b"x" * 32])
def test_what_is_not_signed_is_not_unpickled(tmp_path: Path, signature: bytes) -> None:
    target = tmp_path / "executed"
    with pytest.raises(WorldError, match="does not carry the signature"):
        objects.unpack(signature + pickle.dumps(Payload(str(target))))
    packed = bytearray(objects.pack([1, 2, 3]))
    packed[-2] ^= 1
    with pytest.raises(WorldError, match="does not carry the signature"):
        objects.unpack(bytes(packed))
    assert not target.exists()
    assert objects.unpack(objects.pack({"a": (1, None)})) == {"a": (1, None)}


def stranger_among_them(path: str) -> Any:
    """Rank 1's place in the group is taken by somebody who knows Gloo but not the key."""
    world = World.current()
    honest = objects.all_gather(("rank", world.rank), dist.group.WORLD)
    sizes = collectives.all_gather_object("x" * (world.rank + 1))
    first = objects.gather(world.rank, dist.group.WORLD)
    got = objects.scatter(["a", "b"] if world.rank == 0 else None, dist.group.WORLD)
    if world.rank == 1:
        objects._state["key"] = b"guessed"
    try:
        collectives.all_gather_object(Payload(path) if world.rank == 1 else None)
        problem = ""
    except WorldError as error:
        problem = str(error)
    return honest, sizes, first, got, problem


@pytest.mark.world(2)
def test_a_stranger_in_the_place_of_a_rank_has_nothing_executed(ranks, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    results = ranks.run(stranger_among_them, str(target))
    for rank, (honest, sizes, first, got, problem) in enumerate(results):
        assert honest == [("rank", 0), ("rank", 1)]
        assert sizes == ["x", "xx"]
        assert first == ([0, 1] if rank == 0 else None)
        assert got == "ab"[rank]
        assert "does not carry the signature" in problem
    assert not target.exists()


def knock_at_gloo() -> list[str]:
    """What connecting to the doors of this rank's Gloo groups comes to."""
    import socket

    world = World.current()
    world.background_group("one more")
    group = world.group([0, 1])
    found = []
    for descriptor, _ in sealing._listening():
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            address = copy.getsockname()
        try:
            socket.create_connection(address, timeout=0.2).close()
            found.append("open")
        except TimeoutError:
            found.append("closed")
    total = torch.ones(1)
    collectives.all_reduce(total, group=group)
    assert float(total) == 2.0
    return found


@pytest.mark.world(2)
def test_nobody_gets_in_at_gloos_doors_once_the_ranks_are_connected(ranks) -> None:
    for found in ranks.run(knock_at_gloo):
        assert len(found) >= 2
        assert set(found) == {"closed"}
