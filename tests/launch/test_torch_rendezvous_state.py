"""Torch's rendezvous without its pickles: the state in the store is JSON, and checked."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pickle
import typing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

from paceline.launch.messages import decode, encode
from paceline.launch.rendezvous.torch_state import (
    JsonBackend,
    RendezvousNode,
    RendezvousState,
    from_torch,
    to_torch,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def example() -> Any:
    nodes = [torchs._NodeDesc(name, 100 + i, i) for i, name in enumerate("abcd")]
    state = torchs._RendezvousState()
    state.round, state.complete, state.deadline = 3, True, NOW + timedelta(seconds=3)
    state.participants = {nodes[1]: 0, nodes[0]: 1}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[3]}
    state.last_heartbeats = dict.fromkeys(nodes, NOW)
    return state


def test_the_private_state_of_torch_is_what_it_was_in_2_13() -> None:
    """Fails with a torch whose rendezvous has another state: then adapt rendezvous_state.py."""
    kept = {field.name for field in dataclasses.fields(RendezvousState)}
    assert set(vars(torchs._RendezvousState())) == kept, torch.__version__
    known = {field.name for field in dataclasses.fields(RendezvousNode)}
    assert {field.name for field in dataclasses.fields(torchs._NodeDesc)} == known
    assert set(typing.get_type_hints(torchs._RendezvousState)) == kept


def test_a_state_comes_back_as_it_was() -> None:
    state = example()
    again = to_torch(decode(RendezvousState, encode(from_torch(state))))
    assert vars(again) == vars(state)
    fresh = torchs._RendezvousState()
    assert vars(to_torch(from_torch(fresh))) == vars(fresh)


def test_writers_find_out_who_was_first_and_nothing_in_the_store_is_a_pickle() -> None:
    store = HashStore()
    first, second = (JsonBackend(store, "run", pytest.fail) for _ in range(2))
    assert first.get_state() is None
    state = example()
    written = first.set_state(pickle.dumps(state))
    assert written is not None
    assert written[2]
    state.round = 4
    late = second.set_state(pickle.dumps(state))  # it has not seen what the first one wrote
    assert late is not None
    assert not late[2]
    assert pickle.loads(late[0]).round == 3
    again = second.set_state(pickle.dumps(state), late[1])
    assert again is not None
    assert again[2]
    found = first.get_state()
    assert found is not None
    assert pickle.loads(found[0]).round == 4
    assert json.loads(store.get("rendezvous/run"))["round"] == 4


class Payload:
    """What a stranger would like to have executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def odd_states(folder: Path) -> list[bytes]:
    data = pickle.dumps(Payload(folder / "executed"))
    good = json.loads(encode(from_torch(example())))
    changes: list[dict[str, Any]] = [
        {"round": -1},
        {"round": "3"},
        {"deadline": 1e300},
        {"deadline": 2**70},
        {"participants": [[{"addr": 5, "pid": 1, "local_id": 1}, 0]]},
        {"participants": {"a": 0}},
        {"wait_list": None},
        {"last_heartbeats": [[{"addr": "a", "pid": 1, "local_id": 1}, "now"]]},
    ]
    texts = [json.dumps({**good, **change}).encode() for change in changes]
    return [data, base64.b64encode(data), b"", b"\xff", b"{}", b"[" * 10_000, *texts]


def test_what_a_stranger_wrote_is_not_executed_and_not_in_the_way(tmp_path: Path) -> None:
    store = HashStore()
    said: list[str] = []
    for odd in odd_states(tmp_path):
        backend = JsonBackend(store, "run", said.append)
        store.set("rendezvous/run", odd)
        assert backend.get_state() is None
        store.set("rendezvous/run", odd)
        assert backend.set_state(pickle.dumps(example())) is None  # as if somebody had been first
        again = backend.set_state(pickle.dumps(example()))
        assert again is not None
        assert again[2], "and then it can be written"
    assert not (tmp_path / "executed").exists()
    assert said
