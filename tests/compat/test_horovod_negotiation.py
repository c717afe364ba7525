"""The coordinator's decisions, as pure data: any order of arrival, mismatches, join, deadlocks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from paceline.compat.horovod.common import reduce_ops
from paceline.compat.horovod.runtime.messages import Request, Response
from paceline.compat.horovod.runtime.negotiation import Negotiator

SIZE = 3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def negotiator(fusion_bytes: int = 1 << 20, clock: Clock | None = None) -> Negotiator:
    return Negotiator(SIZE, fusion_bytes, clock or Clock())


def request(rank: int, name: str, kind: str = "allreduce", **fields: object) -> Request:
    values = {"dtypes": ["float32"], "shapes": [[4]], "op": reduce_ops.Sum, **fields}
    return Request(rank, kind, name, **values)  # type: ignore[arg-type]


def errors(answers: list) -> dict[int, str]:
    return {
        rank: response.error
        for response, ranks in answers
        if response.kind == "error"
        for rank in ranks
    }


@given(st.integers(0, 10_000), st.sampled_from([0, 20, 64, 1 << 20]))
def test_every_name_is_done_once_by_all_in_one_order_whatever_the_order_of_arrival(seed, fusion):
    source = random.Random(seed)
    names = [f"allreduce.{number}" for number in range(6)]
    queues = [[request(rank, name) for name in names] for rank in range(SIZE)]
    for queue in queues:
        source.shuffle(queue)
    table, orders = negotiator(fusion), {rank: [] for rank in range(SIZE)}
    while any(queues):
        rank = source.choice([rank for rank in range(SIZE) if queues[rank]])
        for _ in range(source.randint(1, len(queues[rank]))):
            assert table.receive(queues[rank].pop()) == []
        for response, ranks in table.take():
            assert response.kind == "allreduce"
            assert len(response.names) <= max(1, fusion // 16)
            for member in ranks:
                orders[member] += response.names
    assert not table.has_unfinished
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == names


def test_a_mismatch_is_an_error_for_all_that_names_tensor_values_and_ranks():
    cases: list[tuple[str, dict[str, object], list[str]]] = [
        ("allreduce", {"shapes": [[5]]}, ["shapes", "[4]", "[5]"]),
        ("allreduce", {"dtypes": ["int32"]}, ["data types", "float32", "int32"]),
        ("allreduce", {"op": reduce_ops.Max}, ["reduction", "Sum", "Max"]),
        ("allreduce", {"prescale": 0.5}, ["prescale", "1.0", "0.5"]),
        ("allreduce", {"device": "cuda"}, ["devices", "cpu", "cuda"]),
        ("allreduce", {"shapes": [[4], [4]]}, ["numbers of tensors", "1", "2"]),
        ("broadcast", {"root": 1}, ["root ranks", "-1", "1"]),
        ("allgather", {"shapes": [[4, 2]]}, ["first dimension may differ"]),
        ("allreduce", {"problem": "it is broken."}, ["could not take part", "it is broken."]),
    ]
    for kind, fields, words in cases:
        table = negotiator()
        for rank in range(SIZE):
            table.receive(request(rank, "name.x", kind, **(fields if rank == 2 else {})))
        found = errors(table.take())
        assert sorted(found) == [0, 1, 2], (kind, fields)
        for word in ["name.x", "rank 2", *words]:
            assert word in found[0], (word, found[0])
        assert not table.has_unfinished


def test_joined_ranks_are_not_waited_for_and_the_last_one_is_reported():
    table = negotiator()
    table.receive(request(0, "a"))
    table.receive(request(1, "a"))
    assert table.take() == []
    table.receive(Request(2, "join", "join"))
    ((response, ranks),) = table.take()
    assert (response.names, ranks) == (["a"], (0, 1, 2))
    for kind in ("broadcast", "allgather", "alltoall", "reducescatter"):
        table.receive(request(0, "b", kind))
        table.receive(request(1, "b", kind))
        found = errors(table.take())
        assert sorted(found) == [0, 1]
        assert "not supported with Join" in found[0]
    table.receive(Request(0, "join", "join"))
    assert table.take() == []
    table.receive(Request(1, "join", "join"))
    ((response, ranks),) = table.take()
    assert (response.kind, response.value, ranks) == ("join", 1, (0, 1, 2))


def test_ranks_that_all_wait_for_each_other_get_an_error_at_once():
    table = negotiator()
    table.receive(request(0, "allreduce.a", blocks=True))
    table.receive(request(1, "allgather.a", "allgather", blocks=True))
    table.receive(request(2, "allreduce.a", blocks=False))
    assert table.take_deadlock() == []  # rank 2 may still submit the other one
    table.receive(request(2, "barrier", "barrier", blocks=True))
    found = errors(table.take_deadlock())
    assert sorted(found) == [0, 1, 2]
    assert "rank 0 in allreduce.a, rank 1 in allgather.a, rank 2 in barrier" in found[0]
    table.receive(request(0, "x", blocks=True, threaded=True))
    table.receive(request(1, "y", blocks=True))
    table.receive(request(2, "z", blocks=True))
    assert table.take_deadlock() == []  # another thread of rank 0 may yet bring what they wait for


def test_process_sets_are_numbered_once_and_their_removal_fails_what_waits():
    table = negotiator()

    def agree(kind: str, **fields: object) -> Response:
        for rank in range(SIZE):
            table.receive(request(rank, f"{kind}.1", kind, dtypes=[], shapes=[], **fields))
        return table.take()[0].response

    assert agree("add_process_set", ranks=[0, 2]).value == 1
    assert agree("add_process_set", ranks=[0, 2]).value == -1
    table.receive(request(0, "a", process_set=1))
    table.receive(request(2, "a", process_set=1))
    assert table.take()[0].ranks == (0, 2)
    table.receive(request(0, "b", process_set=1))
    for rank in range(SIZE):
        table.receive(
            request(rank, "r", "remove_process_set", dtypes=[], shapes=[], ranks=[0, 2], root=1)
        )
    answers = table.take()
    assert answers[0].response.value == 1
    assert list(errors(answers)) == [0]
    assert "removed" in errors(table.receive(request(0, "c", process_set=1)))[0]
    assert agree("add_process_set", ranks=[0, 2]).value == 2


def test_a_stall_names_the_tensor_and_the_missing_ranks():
    clock = Clock()
    table = negotiator(clock=clock)
    table.receive(request(1, "late"))
    clock.now = 59.0
    assert table.stalled(60.0) == []
    clock.now = 61.0
    (stall,) = table.stalled(60.0)
    assert (stall.name, stall.missing) == ("late", (0, 2))
