"""torch's flight recorder, as we read it. Private to torch: this tells when it changes (2.13)."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from paceline.diagnose.hangs.flight_recorder import first_open_message, switch_on
from paceline.diagnose.hangs.rank_heartbeat import PointToPoint
from paceline.launch.environment import FLIGHT_RECORDER

PROGRAM = """
    import json, dataclasses, os, time
    from paceline.diagnose.hangs import flight_recorder
    flight_recorder.switch_on()
    import torch, torch.distributed as dist


    def tell():
        # Gloo's thread notes an end a moment after the call returns.
        deadline = time.monotonic() + 100
        while any(p.done < p.begun for p in flight_recorder.group_progress()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        print(json.dumps({
            "groups": [dataclasses.asdict(p) for p in flight_recorder.group_progress()],
            "calls": [dataclasses.asdict(c) for c in flight_recorder.calls()],
        }))


    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    second = dist.new_group([0])
    dist.all_reduce(torch.ones(2, 3))
    dist.broadcast(torch.ones(4, dtype=torch.int64), 0, group=second)
    dist.barrier()
    tell()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.broadcast(torch.ones(7), 0)
    tell()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """What was read in a first world, and in a second one that the same process joined."""
    program = textwrap.dedent(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def recorded(both: list[dict[str, Any]]) -> dict[str, Any]:
    return both[0]


def test_calls_are_read_with_group_number_shape_and_dtype(recorded: dict[str, Any]) -> None:
    reduce, barrier, broadcast = recorded["calls"]
    assert (reduce["backend"], reduce["op"], reduce["number"]) == ("gloo", "all_reduce", 1)
    assert (reduce["shapes"], reduce["dtypes"]) == ([[2, 3]], ["float32"])
    assert (broadcast["op"], broadcast["number"], broadcast["dtypes"]) == (
        "broadcast",
        1,
        ["int64"],
    )
    assert (barrier["op"], barrier["number"]) == ("barrier", 2)
    assert reduce["group"] == barrier["group"] != broadcast["group"]
    assert all(call["ranks"] == [0] and call["done"] for call in recorded["calls"])


def test_places_count_by_group(recorded: dict[str, Any]) -> None:
    by_group = {p["group"]: (p["begun"], p["done"], p["ranks"]) for p in recorded["groups"]}
    first, second = (recorded["calls"][n]["group"] for n in (0, 2))
    assert by_group == {first: (2, 2, [0]), second: (1, 1, [0])}


def test_a_second_world_is_not_mixed_up_with_the_first(both: list[dict[str, Any]]) -> None:
    """Its default group has the name and the ranks that the first one's had."""
    name = both[0]["calls"][0]["group"]
    calls = [c for c in both[1]["calls"] if c["group"] == name]
    assert [(c["number"], c["op"], c["shapes"]) for c in calls] == [(1, "broadcast", [[7]])]
    groups = [p for p in both[1]["groups"] if p["group"] == name]
    assert [(p["begun"], p["done"]) for p in groups] == [(1, 1)]


def test_the_users_choice_of_size_stands() -> None:
    chosen = {FLIGHT_RECORDER: "0"}
    switch_on(chosen)
    assert chosen == {FLIGHT_RECORDER: "0"}
    empty: dict[str, str] = {}
    switch_on(empty)
    assert int(empty[FLIGHT_RECORDER]) > 0


def message(pg: int, number: int, name: str, state: str = "scheduled") -> dict[str, Any]:
    """An entry as NCCL's recorder has it for a message, or for the end of a batch of them."""
    return {
        "pg_id": pg,
        "p2p_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "process_group": (f"group {pg}", ""),
        "state": state,
        "retired": state == "completed",
        "is_p2p": "->" in name or "<-" in name,
    }


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], None),
        ([message(1, 1, "send 0->1", "completed")], None),
        ([message(1, 1, "send 0->1", "completed"), message(1, 2, "recv 0<-1", "started")], "recv"),
        # The parts of a batch are never marked: its end is.
        (
            [
                message(1, 1, "send 0->1"),
                message(1, 1, "recv 0<-1"),
                message(1, 1, "coalesced", "completed"),
            ],
            None,
        ),
        (
            [
                message(1, 1, "send 0->1"),
                message(1, 1, "recv 0<-1"),
                message(1, 1, "coalesced", "started"),
            ],
            "recv",
        ),
        ([message(1, 1, "send 0->1"), message(1, 1, "coalesced")], "send"),
        # What else a group does carries the number of its last message.
        ([message(1, 1, "recv 0<-1"), message(1, 1, "all_reduce", "completed")], "recv"),
    ],
)
def test_messages_of_nccl_that_are_under_way(
    entries: list[dict[str, Any]], expected: str | None
) -> None:
    found = first_open_message(entries, {"group 1": (4, 7)}.__getitem__)
    # The recorder counts ranks in their group.
    assert found == (None if expected is None else PointToPoint(expected, 7))
