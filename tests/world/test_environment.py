"""Reading what a launcher said: what follows, what is refused, with which words."""

from __future__ import annotations

import pytest

from paceline.errors import WorldError
from paceline.launch.environment import Environment, read_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": "node0", "MASTER_PORT": "1"}, {"X": "1"}])
def test_no_launcher_no_place(environ):
    assert read_environment(environ) is None


def test_everything_torchrun_says_is_read():
    assert read_environment(TORCHRUN) == Environment(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node=1,
        nodes=2,
        address="node0",
        port=29500,
        restart_count=3,
        store_is_hosted=True,
    )


def test_the_process_environment_is_the_default(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_environment() == read_environment(TORCHRUN)


# variables, and the (local_rank, local_size, node, nodes) that follow
DERIVED = [
    (BY_HAND, (1, 2, 0, 1)),
    ({**BY_HAND, "MASTER_ADDR": "127.0.1.1"}, (1, 2, 0, 1)),
    ({**BY_HAND, "MASTER_ADDR": "::1"}, (1, 2, 0, 1)),
    ({**BY_HAND, "MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "1"}, (0, 1, 1, 2)),
    ({**BY_HAND, "RANK": "5", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, (1, 4, 1, 2)),
    ({**BY_HAND, "LOCAL_RANK": "0"}, (0, 2, 0, 1)),
    ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1)),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1"}, (0, 1, 0, 1)),
]


@pytest.mark.parametrize(("environ", "expected"), DERIVED)
def test_local_place_follows_where_it_can(environ, expected):
    place = read_environment(environ)
    assert (place.local_rank, place.local_size, place.node, place.nodes) == expected
    assert place.restart_count == 0
    assert not place.store_is_hosted


def test_a_single_rank_needs_no_address():
    place = read_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert place.address is None
    assert place.port is None


REFUSED = [
    ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not. Start the script with torchrun"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not."),
    ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set but RANK and WORLD_SIZE is not."),
    ({**BY_HAND, "RANK": "one"}, "RANK='one' is not a whole number."),
    ({**BY_HAND, "RANK": ""}, "RANK='' is not a whole number."),
    ({**BY_HAND, "WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' is not a whole number."),
    ({**BY_HAND, "RANK": "2"}, "RANK=2 with WORLD_SIZE=2: RANK counts from 0 and must be below"),
    ({**BY_HAND, "RANK": "-1"}, "RANK=-1 must be 0 or more."),
    ({**BY_HAND, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be 1 or more."),
    ({**BY_HAND, "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number."),
    ({**BY_HAND, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
    (
        {"RANK": "0", "WORLD_SIZE": "2"},
        "WORLD_SIZE=2 but MASTER_ADDR and MASTER_PORT is not set: 2 ranks need the host name",
    ),
    ({**BY_HAND, "MASTER_ADDR": ""}, "WORLD_SIZE=2 but MASTER_ADDR is not set"),
    (
        {**BY_HAND, "MASTER_ADDR": "node0"},
        "LOCAL_WORLD_SIZE is not set, and MASTER_ADDR=node0 is another machine's address",
    ),
    (
        {**BY_HAND, "MASTER_ADDR": "node0", "LOCAL_RANK": "0"},
        "LOCAL_WORLD_SIZE is not set, and MASTER_ADDR=node0",
    ),
    ({**BY_HAND, "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2"),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 with LOCAL_WORLD_SIZE=4"),
    ({**TORCHRUN, "GROUP_RANK": "2"}, "GROUP_RANK=2 with GROUP_WORLD_SIZE=2"),
    (
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"},
        "TORCHELASTIC_RESTART_COUNT='x' is not a whole number.",
    ),
]


@pytest.mark.parametrize(("environ", "message"), REFUSED)
def test_partial_or_impossible_places_are_refused_by_name(environ, message):
    with pytest.raises(WorldError) as caught:
        read_environment(environ)
    assert str(caught.value).startswith(message)
