from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed as dist

from checkpoint.memory_cases import (
    empty_parts,
    find_in_memory,
    group,
    make_roots,
    rank_and_size,
    recall,
    root_of,
    state,
    take,
)
from paceline.checkpoint.boxes import Box
from paceline.checkpoint.hashing import FileEntry
from paceline.checkpoint.manifest import Manifest, Stored, TensorEntry
from paceline.checkpoint.memory import snapshots as memory
from paceline.checkpoint.memory.nodes import partners
from paceline.checkpoint.memory.segment_files import folder_of, free_run, make_folder, segments
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.checkpoint.memory.transfer_plan import Transfer, needed, transfers
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.errors import CheckpointError

RUN = "run"


def files(root: str | Path) -> set[str]:
    folder = folder_of(RUN, root)
    return set(os.listdir(folder)) if folder.exists() else set()


def damage(root: str | Path, name: str, *, at: int) -> None:
    """Flip a bit of the byte ``at`` of a file."""
    path = folder_of(RUN, root) / name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- one process


VALUES = {
    "float32": torch.randn(5, 7),
    "bfloat16": torch.randn(3).bfloat16(),
    "float8": torch.randn(9).to(torch.float8_e4m3fn),
    "complex": torch.randn(4, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(6).reshape(2, 3),
    "number": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "one of many": torch.randn(4, 6)[1:3, ::2],
}


def test_every_kind_of_tensor_comes_back_to_the_bit(tmp_path: Path):
    tier = MemorySnapshots(RUN, None, after=None, root=tmp_path)
    tier.snapshot(3, RankState({name: whole_part(t) for name, t in VALUES.items()}))
    tier.close()
    found = find_in_memory(RUN, None, root=tmp_path)
    assert found is not None
    assert (found.step, found.rung) == (3, "own memory")
    targets = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    found.load({name: whole_part(target) for name, target in targets.items()})
    for name, value in VALUES.items():
        for back in (targets[name], found.read_tensor(name)):
            assert back.dtype == value.dtype
            assert back.shape == value.shape
            assert (
                back.contiguous()
                .flatten()
                .view(torch.uint8)
                .equal(value.contiguous().flatten().view(torch.uint8))
            ), name
    found.close()


def test_a_snapshot_is_of_the_moment_it_was_taken(tmp_path: Path):
    value = torch.zeros(1000)
    tier = MemorySnapshots(RUN, None, after=None, root=tmp_path)
    tier.snapshot(1, RankState({"x": whole_part(value)}))
    value.fill_(7)  # the training goes on at once
    tier.wait()
    found = find_in_memory(RUN, None, root=tmp_path)
    assert found is not None
    assert found.read_tensor("x").sum() == 0
    found.close()
    tier.free()


def test_memory_is_reused_and_never_more_than_two_slots(tmp_path: Path):
    tier = MemorySnapshots(RUN, None, after=None, root=tmp_path)
    sizes = []
    for step in range(1, 12):
        tier.snapshot(step, state(step, extra=3_000_000))
        tier.wait()
        sizes.append(segments(tmp_path)[0].bytes)
    assert {name for name in files(tmp_path) if name.endswith(".bin")} == {
        "rank-00000.own.0.bin",
        "rank-00000.own.1.bin",
    }
    assert sizes[1:] == [sizes[1]] * 10
    assert sizes[-1] < 2 * 1.1 * 3_000_000 * 4
    [listed] = segments(tmp_path)
    assert (listed.run, listed.steps) == (os.path.abspath(RUN), (10, 11))
    for step in (12, 13):  # a state that shrinks gives its memory back
        tier.snapshot(step, state(step))
    tier.wait()
    assert segments(tmp_path)[0].bytes < 100_000
    tier.free()
    assert os.listdir(tmp_path) == []
    assert segments(tmp_path) == []


def test_the_structure_may_change_from_step_to_step(tmp_path: Path):
    tier = MemorySnapshots(RUN, None, after=None, root=tmp_path)
    states = [
        RankState({"a": whole_part(torch.ones(3))}),
        RankState({"a": whole_part(torch.ones(3)), "late": whole_part(torch.full((5,), 2.0))}),
        RankState({"a": whole_part(torch.ones(4))}, {"object": 1}),
        RankState({"a": whole_part(torch.ones(4, dtype=torch.int32))}, {"object": 2, "new": 3}),
        RankState({}, {"object": "all" * 100_000}),
        RankState(),
    ]
    for step, each in enumerate(states):
        tier.snapshot(step, each)
        tier.wait()
        found = find_in_memory(RUN, None, root=tmp_path)
        assert found is not None
        assert found.step == step
        assert set(found.manifest.tensors) == set(each.tensors)
        for name, part in each.tensors.items():
            assert torch.equal(found.read_tensor(name), part.pieces[0].tensor)
        assert {name: found.read_object(name) for name in found.manifest.objects} == each.objects
        found.close()
    tier.free()


def test_a_tensor_that_does_not_fit_its_box_is_refused(tmp_path: Path):
    tier = MemorySnapshots(RUN, None, after=None, root=tmp_path)
    whole = Box((0,), (4,))
    tier.snapshot(1, RankState({"x": Part((4,), torch.float32, (Piece(whole, torch.ones(4)),))}))
    for wrong in (torch.ones(1), torch.ones(4, dtype=torch.float64)):
        part = Part((4,), torch.float32, (Piece(whole, wrong),))
        with pytest.raises(CheckpointError, match="tensor 'x'"):
            tier.snapshot(2, RankState({"x": part}))
    tier.free()


def test_too_little_memory_is_said_and_the_last_snapshot_stays(mount):
    root = mount(size="1m")
    tier = MemorySnapshots(RUN, None, after=None, root=root)
    tier.snapshot(1, RankState({"x": whole_part(torch.ones(1000))}))
    for size in (10**6, 10**13):
        large = torch.ones(1).expand(size)  # takes no memory of its own
        with pytest.raises(CheckpointError, match=r"needs 40\d+ more bytes in .* \d+ are free"):
            tier.snapshot(2, RankState({"x": whole_part(large)}))
    assert segments(root)[0].steps == (1,)
    tier.snapshot(3, RankState({"x": whole_part(torch.ones(1000))}))
    tier.wait()
    assert segments(root)[0].steps == (1, 3)
    # Objects that outgrow their room meet the same end.
    with pytest.raises(CheckpointError, match="more bytes"):
        tier.snapshot(4, RankState({"x": whole_part(torch.ones(1000))}, {"text": "x" * 2**20}))
    tier.free()
    assert os.listdir(root) == []


FOREIGN = PurePosixPath("x")  # an object like any, of a class that is none of torch's


def test_what_cannot_be_loaded_safely_does_not_count(tmp_path: Path):
    tier = MemorySnapshots(RUN, None, after=None, root=tmp_path)
    good = RankState({}, {"object": 1})
    tier.snapshot(1, good)
    tier.snapshot(2, good)
    tier.snapshot(3, RankState({}, {"object": {"class": FOREIGN}}))
    with pytest.raises(CheckpointError, match="step 3 failed: object 'object'"):
        tier.wait()
    with pytest.raises(CheckpointError, match="step 3 failed: object 'object'"):
        tier.snapshot(4, good)
    assert segments(tmp_path)[0].steps == (2,)
    tier.snapshot(5, good)
    tier.wait()
    assert segments(tmp_path)[0].steps == (2, 5)
    with pytest.raises(CheckpointError, match="object 'object' cannot be saved"):
        tier.snapshot(6, RankState({}, {"object": lambda: 0}))
    tier.snapshot(7, good)
    tier.free()


def test_the_next_snapshot_waits_for_the_one_before(tmp_path: Path, monkeypatch):
    real = memory.hash_blocks

    asked = threading.Event()

    def slow(data: memoryview, **how: object) -> tuple[str, ...]:
        asked.wait(300)
        time.sleep(0.5)
        return real(data, **how)

    monkeypatch.setattr(memory, "hash_blocks", slow)
    tier = MemorySnapshots(RUN, None, after=None, root=tmp_path)
    first = tier.snapshot(1, state(1))
    asked.set()
    second = tier.snapshot(2, state(2))
    assert first.waited < 100
    assert second.waited > 0.2
    assert second.seconds >= second.waited
    tier.free()


def test_files_taken_from_under_a_run_are_noticed_and_made_again(tmp_path: Path):
    tier = MemorySnapshots(RUN, None, after=None, root=tmp_path)
    tier.snapshot(1, state(1))
    tier.wait()
    shutil.rmtree(folder_of(RUN, tmp_path))
    said = []
    for step in range(2, 6):
        try:
            tier.snapshot(step, state(step))
            tier.wait()
        except CheckpointError as error:
            said.append(str(error))
    assert 1 <= len(said) <= 2
    assert str(folder_of(RUN, tmp_path)) in said[0]
    assert segments(tmp_path)[0].steps[-1] == 5
    tier.free()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_folder_that_somebody_else_prepared_is_not_used(tmp_path: Path, kind: str):
    target = folder_of(RUN, tmp_path)
    if kind == "file":
        target.write_text("")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=str(target)):
        MemorySnapshots(RUN, None, after=None, root=tmp_path)


def test_a_root_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere"):
        MemorySnapshots(RUN, None, after=None, root=tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        find_in_memory(RUN, None, root=tmp_path / "nowhere")


def test_runs_do_not_see_each_other(tmp_path: Path):
    for run in ("one", "two"):
        tier = MemorySnapshots(run, None, after=None, root=tmp_path)
        tier.snapshot(1, RankState({}, {"run": run}))
        tier.close()
    found = find_in_memory("two", None, root=tmp_path)
    assert found is not None
    assert found.read_object("run") == "two"
    found.close()
    assert len(segments(tmp_path)) == 2
    assert free_run("one", tmp_path) > 0
    assert [Path(held.run).name for held in segments(tmp_path)] == ["two"]
    assert find_in_memory("one", None, root=tmp_path) is None
    assert free_run("two", tmp_path) > 0
    assert free_run("two", tmp_path) == 0
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- which one counts


def test_a_history_that_was_given_up_does_not_come_back(tmp_path: Path):
    roots = [str(tmp_path)]
    take(roots, [14, 15])
    # Gone back to step 5 on purpose: step 15 must not win after a crash.
    tier = MemorySnapshots(RUN, None, after=5, root=tmp_path)
    assert recall(roots) is None
    tier.snapshot(6, state(6), {"reason": "test"})
    tier.close()
    assert recall(roots) == ("own memory", 6, [])


def test_the_snapshot_gone_on_from_stays_until_there_is_a_newer_one(tmp_path: Path):
    roots = [str(tmp_path)]
    take(roots, [8, 9])
    tier = MemorySnapshots(RUN, None, after=9, root=tmp_path)
    assert recall(roots) == ("own memory", 9, [])
    tier.snapshot(10, state(10), {"reason": "test"})
    tier.wait()
    assert segments(tmp_path)[0].steps == (9, 10)
    tier.snapshot(11, state(11), {"reason": "test"})
    tier.close()
    assert segments(tmp_path)[0].steps == (10, 11)


def test_a_run_of_another_identity_is_not_restored(tmp_path: Path):
    roots = [str(tmp_path)]
    take(roots, [4], identity="first")
    said: list[str] = []
    assert (
        find_in_memory(RUN, None, identity="second", root=tmp_path, on_problem=said.append) is None
    )
    assert "another run" in said[0]
    assert recall(roots, identity="first") == ("own memory", 4, [])
    take(roots, [1], after=4, identity="second")
    assert recall(roots, identity="first") is None
    assert recall(roots, identity="second") == ("own memory", 1, [])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rank-00000.own.1.bin", "block at byte 0"),
        ("rank-00000.own.1.json", "damaged"),
        ("rank-00000.own.1.index", "damaged"),
    ],
)
def test_a_damaged_segment_is_named_and_stepped_over(tmp_path: Path, name: str, said: str):
    roots = [str(tmp_path)]
    take(roots, [1, 2])
    damage(tmp_path, name, at=150)
    found = recall(roots)
    assert found is not None
    assert found[:2] == ("own memory", 1)
    assert name in found[2][0]
    assert said in found[2][0]


@pytest.mark.world(2)
def test_segments_that_changed_places_are_noticed(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 1)
    ranks(take, roots, [1, 2])
    folder = folder_of(RUN, roots[0])
    for ending in ("bin", "index", "json"):
        one, other = (folder / f"rank-0000{rank}.own.1.{ending}" for rank in (0, 1))
        one.rename(folder / "aside")
        other.rename(one)
        (folder / "aside").rename(other)
    found = ranks(recall, roots)[0]
    assert found is not None
    assert found[1] == 1
    assert "expected that of rank-00000.bin, found that of rank-00001.bin" in found[2][0]


def test_a_segment_that_was_cut_or_lost_its_bytes_is_stepped_over(tmp_path: Path):
    roots = [str(tmp_path)]
    take(roots, [1, 2, 3])
    newest = folder_of(RUN, tmp_path) / "rank-00000.own.0.bin"
    os.truncate(newest, 64)
    found = recall(roots)
    assert found is not None
    assert found[1] == 2
    assert "expected" in found[2][0]
    newest.unlink()
    found = recall(roots)
    assert found is not None
    assert found[1] == 2
    damage(tmp_path, "rank-00000.own.1.bin", at=8)
    assert recall(roots) is None


# ---------------------------------------------------------------- several ranks and nodes


@pytest.mark.world(3)
def test_ranks_of_one_node_share_its_memory(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 1)
    notes = ranks(take, roots, [1, 2, 3])
    assert all("one node" in note for [note] in notes)
    assert ranks(recall, roots, True) == [("own memory", 3, [])] * 3
    # Each box once: the three ranks hold the replicated tensor together, not each.
    assert {name.rpartition(".")[0] for name in files(roots[0]) if name != "run.json"} == {
        f"rank-0000{rank}.own.{slot}" for rank in range(3) for slot in (0, 1)
    }
    for other in (1, 2, 4):  # it is a checkpoint like any: another number of ranks may load it
        assert ranks(recall, roots, world_size=other) == [("own memory", 3, [])] * other


@pytest.mark.world(4)
def test_a_lost_node_is_made_up_for_by_its_partner(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 2)
    assert ranks(take, roots, [1, 2]) == [[]] * 4
    assert ranks(recall, roots) == [("own memory", 2, [])] * 4
    shutil.rmtree(folder_of(RUN, roots[0]))
    assert ranks(recall, roots, True) == [("partner memory", 2, [])] * 4
    assert os.listdir(roots[0]) == []  # what was brought there for the load is gone again
    # The node that is left is enough for any number of ranks.
    assert ranks(recall, roots[1:], world_size=2) == [("partner memory", 2, [])] * 2
    shutil.rmtree(folder_of(RUN, roots[1]))
    assert ranks(recall, roots) == [None] * 4


@pytest.mark.world(3)
def test_each_of_three_nodes_may_be_lost_but_not_two(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 3)
    ranks(take, roots, [5])
    for lost in range(3):
        kept = tmp_path / "kept"
        shutil.move(folder_of(RUN, roots[lost]), kept)
        assert ranks(recall, roots, True) == [("partner memory", 5, [])] * 3
        shutil.move(kept, folder_of(RUN, roots[lost]))
    shutil.rmtree(folder_of(RUN, roots[0]))
    shutil.rmtree(folder_of(RUN, roots[1]))
    assert ranks(recall, roots) == [None] * 3


@pytest.mark.world(2)
def test_a_damaged_segment_is_made_up_for_by_its_copy(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 2)
    ranks(take, roots, [1, 2])
    damage(roots[1], "rank-00001.own.1.bin", at=3)
    assert ranks(recall, roots, True) == [("partner memory", 2, [])] * 2
    damage(roots[0], "rank-00001.copy.1.bin", at=3)  # both: the older one is whole
    found = ranks(recall, roots)
    assert [one[:2] for one in found] == [("own memory", 1)] * 2
    assert "rank-00001.own.1.bin" in found[0][2][0]
    assert "rank-00001.copy.1.bin" in found[0][2][0]


@pytest.mark.world(2)
def test_a_snapshot_that_one_rank_did_not_finish_does_not_count(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 1)
    ranks(take, roots, [1, 2, 3])
    (folder_of(RUN, roots[0]) / "rank-00001.own.0.json").unlink()  # as if killed before the commit
    found = ranks(recall, roots)
    assert [one[:2] for one in found] == [("own memory", 2)] * 2
    assert "lacks rank-00001.bin" in found[0][2][0]
    # Going on from step 2, step 3 of rank 0 is no part of anything, and step 2 must stay.
    ranks(take, roots, [3], 2)
    assert segments(roots[0])[0].steps == (2, 3)
    assert ranks(recall, roots) == [("own memory", 3, [])] * 2


@pytest.mark.world(2)
def test_segments_of_one_step_from_two_attempts_are_not_mixed(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 2)
    ranks(take, roots, [7])
    shutil.copytree(folder_of(RUN, roots[1]), tmp_path / "old")
    ranks(take, roots, [7], 6)
    shutil.rmtree(folder_of(RUN, roots[1]))
    shutil.copytree(tmp_path / "old", folder_of(RUN, roots[1]))
    # Node 0 holds all of the second attempt: its own, and the copy it keeps.
    assert [one[:2] for one in ranks(recall, roots)] == [("partner memory", 7)] * 2


def shrinking(roots: list[str], after: int | None, steps: list[int]) -> set[str]:
    tier = MemorySnapshots(RUN, group(), after=after, root=root_of(roots))
    for step in steps:
        tier.snapshot(step, state(step), {"reason": "test"})
    tier.wait()
    dist.barrier()
    left = files(root_of(roots))
    dist.barrier()
    tier.free()
    return left


@pytest.mark.world(4)
def test_what_ranks_that_are_no_more_left_is_cleared_away(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 2)
    ranks(take, roots, [1, 2])
    left = ranks(shrinking, roots, 2, [3], world_size=2)[0]
    assert any(name.startswith("rank-00003") for name in left)  # step 2 is still needed
    ranks(take, roots, [1, 2])
    left = ranks(shrinking, roots, 2, [3, 4], world_size=2)[0]
    assert {name for name in left if name.endswith(".json")} == {
        "run.json",
        *(
            f"rank-0000{rank}.{kind}.{s}.json"
            for rank, kind in ((0, "own"), (1, "copy"))
            for s in "01"
        ),
    }
    assert [os.listdir(root) for root in roots] == [[], []]


def failing(roots: list[str]) -> list[str]:
    rank, _ = rank_and_size()
    tier = MemorySnapshots(RUN, group(), after=None, root=root_of(roots))
    tier.snapshot(1, state(1), {"reason": "test"})
    said = []
    wrong = [state(step) for step in range(2, 6)]
    if rank == 1:
        wrong[0].objects["random/1"] = lambda: 0
        wrong[1].objects["random/1"] = FOREIGN
        wrong[3].tensors["huge"] = whole_part(torch.ones(1).expand(10**13))
    for step, each in enumerate(wrong, start=2):
        try:
            tier.snapshot(step, each, {"reason": "test"})
        except CheckpointError as error:
            said.append(f"{step}: {error}")
    tier.snapshot(9, state(9), {"reason": "test"})
    tier.close()
    return said


@pytest.mark.world(2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_what_one_rank_cannot_do_all_ranks_hear_of(ranks, tmp_path: Path, nodes: int):
    roots = make_roots(tmp_path, nodes)
    first, second = ranks(failing, roots)
    assert first == second
    assert [said.partition(":")[0] for said in first] == ["2", "4", "5"]
    assert all("Rank 1: " in said for said in first)
    assert "step 3 failed" in first[1]
    assert ranks(recall, roots) == [("own memory", 9, [])] * 2


def losing_a_folder(roots: list[str]) -> list[str]:
    """Somebody removes the files of rank 1's node while the run goes on."""
    rank, _ = rank_and_size()
    tier = MemorySnapshots(RUN, group(), after=None, root=root_of(roots))
    said = []
    for step in range(1, 8):
        if step == 3 and rank == 1:
            tier.wait()
            shutil.rmtree(folder_of(RUN, root_of(roots)))
        try:
            tier.snapshot(step, state(step), {"reason": "test"})
        except CheckpointError as error:
            said.append(f"{step}: {error}")
    tier.close()
    return said


@pytest.mark.world(2)
def test_what_happens_on_one_node_all_ranks_hear_of_and_get_over(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 2)
    first, second = ranks(losing_a_folder, roots)
    assert first == second
    assert 1 <= len(first) <= 2
    assert "Rank 1: the snapshot in memory of step 3 failed" in first[0]
    assert ranks(recall, roots) == [("own memory", 7, [])] * 2


def to_a_full_node(roots: list[str]) -> tuple[list[str], tuple[int, ...]]:
    """Rank 1 takes snapshots that grow; the copy finds ever less room on the node of rank 0."""
    rank, _ = rank_and_size()
    tier = MemorySnapshots(RUN, group(), after=None, root=roots[rank])
    said, taken = [], []
    for step, extra in enumerate([1000, 1000, 1_000_000, 1000, 1000], start=1):
        own = {f"own/{rank}": whole_part(torch.full((extra * rank,), float(step)))}
        try:
            tier.snapshot(step, RankState(own))
            tier.wait()
            taken.append(step)
        except CheckpointError as error:
            said.append(str(error))
    steps = segments(roots[rank])[0].steps
    tier.free()
    return said, steps


@pytest.mark.world(2)
def test_a_copy_that_finds_no_room_is_said_on_both_nodes(ranks, tmp_path: Path, mount):
    small, large = mount(size="2m"), tmp_path / "large"
    large.mkdir()
    (first, steps), (second, _) = ranks(to_a_full_node, [str(small), str(large)])
    # On the full node at once, on the other one by the next snapshot.
    assert "the copy of rank 1 was refused" in first[0]
    assert "more bytes" in first[0]
    assert "Rank 0: the snapshot in memory of step 3 failed" in first[1]
    assert second == first[1:]
    assert steps == (2, 5)
    assert os.listdir(small) == os.listdir(large) == []


def uneven(roots: list[str], nodes: list[int]) -> tuple[int | None, str]:
    rank, _ = rank_and_size()
    root = roots[nodes[rank]]
    tier = MemorySnapshots(RUN, group(), after=None, root=root)
    tier.snapshot(1, state(1))
    tier.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder_of(RUN, roots[0]))
    dist.barrier()
    found = find_in_memory(RUN, group(), root=root)
    assert found is not None
    found.load(empty_parts())
    found.close()
    return tier.partner, found.rung


@pytest.mark.world(4)
def test_nodes_may_hold_different_numbers_of_ranks(ranks, tmp_path: Path):
    roots = make_roots(tmp_path, 2)
    found = ranks(uneven, roots, [0, 0, 0, 1])
    assert found == [(3, "partner memory")] * 3 + [(0, "partner memory")]


# ---------------------------------------------------------------- plans, without processes


def test_partners_are_on_the_next_node():
    assert partners([[0, 1, 2, 3]]) == [None] * 4
    assert partners([[0, 1], [2, 3]]) == [2, 3, 0, 1]
    assert partners([[0, 1], [2, 3], [4, 5]]) == [2, 3, 4, 5, 0, 1]
    assert partners([[0, 2], [1, 3]]) == [1, 0, 3, 2]
    assert partners([[0, 1, 2], [3]]) == [3, 3, 3, 0]


def manifest() -> Manifest:
    """A tensor of 16 rows of 16 numbers, 8 rows each in two files of blocks of 256 bytes."""
    stored = [Stored(Box((8 * i, 0), (8, 16)), f"f{i}", 256, 8 * 16 * 8) for i in range(2)]
    hashes = ("",) * 5
    entries = {f"f{i}": FileEntry(256 + 1024, hashes, 256) for i in range(2)}
    return Manifest(1, {}, entries, {"x": TensorEntry((16, 16), "float64", tuple(stored))})


def part(*boxes: Box) -> dict[str, Part]:
    pieces = (Piece(one, torch.zeros(one.shape, dtype=torch.float64)) for one in boxes)
    return {"x": Part((16, 16), torch.float64, tuple(pieces))}


def test_only_the_blocks_that_are_needed_are_asked_for():
    assert needed(part(Box((0, 0), (16, 16))), manifest()) == {
        "f0": frozenset({1, 2, 3, 4}),
        "f1": frozenset({1, 2, 3, 4}),
    }
    assert needed(part(Box((2, 3), (1, 5))), manifest()) == {"f0": frozenset({2})}
    assert needed(part(Box((9, 0), (2, 16))), manifest()) == {"f1": frozenset({1, 2})}
    far_apart = part(Box((0, 0), (1, 1)), Box((7, 15), (1, 1)))
    assert needed(far_apart, manifest()) == {"f0": frozenset({1, 2, 3, 4})}
    assert needed(part(), manifest()) == {}
    assert needed({"unknown": part()["x"]}, manifest()) == {}


def test_a_node_gets_what_its_ranks_lack_once():
    wanted = [{}, {}, {"f0": frozenset({0, 1, 3})}, {"f0": frozenset({1, 4}), "f1": frozenset({2})}]
    plan = transfers(wanted, [[0, 1], [2, 3]], {"f0": [0], "f1": [0]}, manifest().files)
    assert plan == [
        Transfer("f0", 0, 2, 0, 512),
        Transfer("f0", 0, 2, 768, 1280),
        Transfer("f1", 1, 3, 512, 768),
    ]


def test_a_run_may_be_known_by_a_url(tmp_path: Path):
    assert make_folder("s3://bucket/run", tmp_path) == folder_of("s3://bucket/run", tmp_path)
    assert [held.run for held in segments(tmp_path)] == ["s3://bucket/run"]
    free_run("s3://bucket/run", tmp_path)
