"""Finding on CPU ranks what would hang over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.models import GPT, token_cross_entropy
from paceline.testing import CommunicationRecord, find_deadlock


def _recorded(what: Any) -> list[Any]:
    with CommunicationRecord() as record:
        what()
        return record.issued()


@pytest.mark.world(2)
def test_what_would_hang_is_found(ranks):
    def job():
        world = paceline.World.current()
        other, first = 1 - world.rank, dist.new_group([0, 1])
        mine, theirs = torch.ones(3), torch.empty(3)

        def each_receives_first():
            works = [dist.irecv(theirs, other), dist.isend(mine, other)]
            for work in works:
                work.wait()

        def in_a_batch():
            ops = [dist.P2POp(dist.irecv, theirs, other), dist.P2POp(dist.isend, mine, other)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        def in_turns():
            for sender in (0, 1):
                if world.rank == sender:
                    dist.send(mine, other)
                else:
                    dist.recv(theirs, src=other)

        def groups_in_another_order():
            groups = [first, None] if world.rank else [None, first]
            works = [dist.all_reduce(torch.ones(2), group=g, async_op=True) for g in groups]
            for work in works:
                work.wait()

        def groups_in_order():
            for group in (first, None):
                dist.all_reduce(torch.ones(2), group=group)

        def message_across_a_collective():
            # Rank 0 sends and goes on; rank 1 looks for it only after they have met.
            if world.rank == 0:
                work = dist.isend(mine, 1)
                dist.all_reduce(torch.ones(2))
                work.wait()
            else:
                dist.all_reduce(torch.ones(2))
                dist.recv(theirs, 0)

        def several_kinds_of_number():
            dist.all_reduce(torch.ones(1, dtype=torch.float32 if world.rank else torch.int32))

        return [
            _recorded(what)
            for what in (
                in_a_batch,
                in_turns,
                groups_in_order,
                each_receives_first,
                groups_in_another_order,
                message_across_a_collective,
                several_kinds_of_number,
            )
        ]

    batch, turns, order, receives, groups, across, kinds = (
        find_deadlock(both) for both in zip(*ranks(job), strict=True)
    )
    assert batch is turns is order is None
    for found in (receives, groups, across):
        assert found.startswith("these ranks wait for each other:\n  rank 0, after 0 others: ")
    assert "recv from rank 1 (test_nccl_order.py:" in receives
    assert "all_reduce [2] of ranks [0, 1]" in groups
    assert "send to rank 1" in across
    assert kinds.startswith("these ranks do different things in one collective:")


@pytest.mark.world(4)
def test_tied_weights_shards_and_an_evaluation_in_a_pipeline(ranks):
    def job():
        torch.manual_seed(0)
        engine = paceline.Engine(
            GPT(vocab_size=16, context=4, layers=2, heads=2, width=8),
            loss=token_cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            layout="dp=2,zero=1,pp=2",
            microbatch=1,
            clip_norm=1.0,
        )
        tokens = torch.arange(15).view(3, 5) % 16
        share = slice(*paceline.data.share(3, engine.world.rank % 2, 2))
        with CommunicationRecord() as record:
            engine.step((tokens[share, :-1], tokens[share, 1:]))
            engine.evaluate((tokens[share, :-1], tokens[share, 1:]))
            engine.state_dict()
            return record.issued()

    recordings = ranks(job)
    assert find_deadlock(recordings) is None
    assert all(any(each.messages for each in issued) for issued in recordings)
    assert all(any(each.call for each in issued) for issued in recordings)
