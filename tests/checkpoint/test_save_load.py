from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoint.state_cases import (
    load_simulated,
    memory,
    part_of,
    random_tensor,
    same_bits,
    save_simulated,
    spread,
)
from paceline.checkpoint.boxes import Box, whole
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.hashing import BLOCK, BlockHasher
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.checkpoint.sharded import writer
from paceline.checkpoint.sharded.save_load import load, save
from paceline.checkpoint.storage.local import LocalStorage
from paceline.errors import CheckpointError, RankFailed
from paceline.testing import assert_same

FULL = torch.arange(60.0).reshape(12, 5)


def rows(rank: int, size: int) -> Box:
    each = 12 // size
    return Box((rank * each, 0), (each, 5))


def columns(rank: int, size: int) -> Box:
    return Box((0, rank), (12, 1 if rank < size - 1 else 5 - rank))


def rank_state(box: Box, rank: int, scale: float = 1.0) -> RankState:
    tensors = {
        "model/w": part_of(FULL * scale, [box]),
        "model/bias": whole_part(torch.ones(7) * scale),
        "optimizer/w/step": whole_part(torch.tensor(3.0)),
    }
    return RankState(tensors, {f"random/{rank}": {"rank": rank, "state": torch.arange(4)}})


def empty(name: str, box: Box) -> dict[str, Part]:
    own = torch.zeros(tuple(reversed(box.shape))).t()
    return {name: Part((12, 5), torch.float32, (Piece(box, own),))}


def whole_w(checkpoint: Any) -> torch.Tensor:
    parts = empty("model/w", whole((12, 5)))
    load(checkpoint, parts, None)
    return parts["model/w"].pieces[0].tensor


class Faulty(LocalStorage):
    """A disk of which ``fault`` decides what goes wrong when a data file is written."""

    def __init__(self, where: str, fault: Any) -> None:
        super().__init__(where)
        self.fault = fault

    def create(self, path: str, chunks: Iterable[memoryview]) -> None:
        super().create(path, self.fault(self.root / path, chunks))


def faulty(where: str, fault: Any) -> Folder:
    folder = Folder(where)
    folder.storage = Faulty(where, fault)
    return folder


def no_space(_: Path, chunks: Iterable[memoryview]) -> Iterable[memoryview]:
    yield from list(chunks)[:1]
    raise OSError(28, "No space left on device")


# One process


def test_one_process_needs_no_group_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = rank_state(whole((12, 5)), 0)
    state.tensors["empty"] = whole_part(torch.empty(0, 3, dtype=torch.int16))
    state.tensors["conj"] = whole_part(torch.tensor([1 + 2j, 3 - 4j]).conj())
    checkpoint = save(Folder(tmp_path), 12, state, info={"reason": "test"}, group=None)
    assert checkpoint.path == str(tmp_path / "step-000000012")
    assert checkpoint.manifest.info == {"reason": "test"}
    assert not checkpoint.damages()
    parts = {
        name: whole_part(torch.zeros(part.shape, dtype=part.dtype))
        for name, part in state.tensors.items()
    }
    load(checkpoint, parts, None)
    for name, part in parts.items():
        assert_same(part.pieces[0].tensor, state.tensors[name].pieces[0].tensor)
    assert_same(checkpoint.read_object("random/0"), state.objects["random/0"])
    assert capfd.readouterr() == ("", "")


def test_parameters_that_require_gradients(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    part = Part((4, 3), torch.float32, (Piece(whole((4, 3)), parameter),))
    checkpoint = save(Folder(tmp_path), 1, RankState({"p": part}), info={}, group=None)
    other = torch.nn.Parameter(torch.zeros(3, 4).t())
    load(checkpoint, {"p": Part((4, 3), torch.float32, (Piece(whole((4, 3)), other),))}, None)
    assert_same(other.data, parameter.data)
    assert other.requires_grad


def test_each_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{i}": torch.randn(600_001) for i in range(8)}
    state = RankState({name: whole_part(tensor) for name, tensor in tensors.items()})
    checkpoint = save(Folder(tmp_path), 1, state, info={}, group=None)
    assert checkpoint.manifest.size > 4 * BLOCK
    reads = count_reads(monkeypatch)
    parts = {name: whole_part(torch.zeros(600_001)) for name in reversed(tensors)}
    load(checkpoint, parts, None)
    assert sum(reads.values()) == checkpoint.manifest.size
    for name, tensor in tensors.items():
        assert_same(parts[name].pieces[0].tensor, tensor)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How many bytes are read from each place in a file, which may be read from only once."""
    reads: dict[int, int] = {}
    preadv = os.preadv

    def counted(handle: int, buffers: list[memoryview], offset: int) -> int:
        assert offset not in reads
        reads[offset] = preadv(handle, buffers, offset)
        return reads[offset]

    monkeypatch.setattr(os, "preadv", counted)
    return reads


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(writer, "BlockHasher", functools.partial(BlockHasher, size))


def test_each_block_is_read_once_whichever_parts_must_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 256)
    tensors = {f"t{i}": torch.randn(10 * i + 1, 3) for i in range(20)}
    state = RankState({name: whole_part(tensor) for name, tensor in tensors.items()})
    checkpoint = save(Folder(tmp_path), 1, state, info={}, group=None)
    assert len(checkpoint.manifest.files) == 1
    reads = count_reads(monkeypatch)
    into = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    for i in range(0, 20, 3):  # bytes cannot go there straight
        into[f"t{i}"] = torch.zeros(3, 10 * i + 1).t()
    load(checkpoint, {name: whole_part(tensor) for name, tensor in into.items()}, None)
    assert sum(reads.values()) == checkpoint.manifest.size
    for name, tensor in tensors.items():
        assert_same(into[name].contiguous(), tensor)


@pytest.mark.parametrize("block", [16, 100, 1024])
@pytest.mark.parametrize("seed", range(8))
def test_any_cut_loads_into_any_other_from_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, seed: int
) -> None:
    small_blocks(monkeypatch, block)
    draw = random.Random(seed)
    tensors = {f"t{i}": random_tensor(draw) for i in range(20)}
    checkpoint = save_simulated(Folder(tmp_path), 3, spread(tensors, 3, draw))
    for state in spread(tensors, 2, draw):
        wanted = {
            name: Part(
                part.shape,
                part.dtype,
                tuple(Piece(p.box, memory(p.box.shape, part.dtype, draw)) for p in part.pieces),
            )
            for name, part in state.tensors.items()
        }
        load_simulated(checkpoint, wanted)
        for name, part in wanted.items():
            for piece in part.pieces:
                assert same_bits(piece.tensor, tensors[name][piece.box.slices()])


def test_a_step_saved_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    box = whole((12, 5))
    first = set(save(folder, 4, rank_state(box, 0), info={}, group=None).manifest.files)
    second = save(folder, 4, rank_state(box, 0, scale=2.0), info={}, group=None)
    assert_same(whole_w(second), FULL * 2)
    assert first.isdisjoint(second.manifest.files)
    found = set(os.listdir(tmp_path / "step-000000004"))
    assert found == {"manifest.json", *second.manifest.files}

    with pytest.raises(CheckpointError, match="No space left"):
        save(faulty(str(tmp_path), no_space), 4, rank_state(box, 0), info={}, group=None)
    assert set(os.listdir(tmp_path / "step-000000004")) == found
    assert_same(whole_w(folder.get(4)), FULL * 2)


def test_what_an_unfinished_save_left_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / "step-000000004" / "rank-00007-01234567.bin"
    left.parent.mkdir()
    left.write_bytes(b"half")
    save(Folder(tmp_path), 4, rank_state(whole((12, 5)), 0), info={}, group=None)
    assert not left.exists()


def test_a_failed_save_frees_its_space(tmp_path: Path) -> None:
    state = rank_state(whole((12, 5)), 0)
    with pytest.raises(CheckpointError, match=r"saving step 4 .*No space left.*are untouched"):
        save(faulty(str(tmp_path), no_space), 4, state, info={}, group=None)
    assert os.listdir(tmp_path) == []


def test_what_does_not_read_back_is_not_committed(tmp_path: Path) -> None:
    def flip(path: Path, chunks: Iterable[memoryview]) -> Iterable[memoryview]:
        for number, chunk in enumerate(chunks):
            data = bytearray(chunk)
            data[0] ^= number == 1
            yield memoryview(data)

    state = rank_state(whole((12, 5)), 0)
    with pytest.raises(CheckpointError, match=r"does not read back as it was written: .*block at"):
        save(faulty(str(tmp_path), flip), 4, state, info={}, group=None)
    assert not Folder(tmp_path).checkpoints()


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_run_that_lost_its_lock_commits_nothing(
    tmp_path: Path, memory_url: str, kind: str, when: str
) -> None:
    folder = Folder(str(tmp_path) if kind == "local" else memory_url)
    state = rank_state(whole((12, 5)), 0)
    with folder.lock("this run"):
        save(folder, 1, state, info={}, group=None)
        storage, create = folder.storage, folder.storage.create

        def take_over() -> None:
            storage.delete(".lock")  # as a person does who takes this run for dead
            other = Folder(storage.where)
            lock = other.lock("the other run")
            other.storage.make_folder("step-000000002")
            other.storage.create("step-000000002/rank-00000-01234567.bin", [memoryview(b"theirs")])
            stack.callback(lock.release)

        def then_take_over(path: str, chunks: Iterable[memoryview]) -> None:
            create(path, chunks)
            take_over()

        with contextlib.ExitStack() as stack:
            if when == "before":
                take_over()
            else:
                storage.create = then_take_over  # type: ignore[method-assign]
            said = r"failed: .*lock.*Nothing more is written there"
            with pytest.raises(CheckpointError, match=said):
                save(folder, 2, state, info={}, group=None)
            # The first one is as good as ever, and what the other run writes is left alone.
            assert [checkpoint.step for checkpoint in folder.checkpoints()] == [1]
            assert not folder.get(1).damages()
            assert storage.names("step-000000002") == ["rank-00000-01234567.bin"]


@pytest.mark.parametrize("info", [{"a": {1}}, {"b": Path()}])
def test_info_must_be_fit_for_json(tmp_path: Path, info: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        save(Folder(tmp_path), 4, RankState(), info=info, group=None)
    with pytest.raises(CheckpointError, match="step -1: steps are counted from 0"):
        save(Folder(tmp_path), -1, RankState(), info={}, group=None)
    assert os.listdir(tmp_path) == []


def test_damage_is_named_before_it_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save(Folder(tmp_path), 4, rank_state(whole((12, 5)), 0), info={}, group=None)
    (file,) = checkpoint.manifest.files
    path = tmp_path / "step-000000004" / file
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(
        CheckpointError, match=rf"loading .*{file} is damaged: block at byte 0: exp"
    ):
        whole_w(checkpoint)
    path.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=f"{file}.*expected {len(good)} bytes, found"):
        whole_w(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{file}.* missing"):
        whole_w(checkpoint)
    with pytest.raises(CheckpointError, match=r"holds no manifest.json"):
        whole_w(Folder(tmp_path).get(5))
    assert capfd.readouterr().err == ""


# Several ranks


def _save(where: str, cut: Any, repeat: int = 1) -> list[str]:
    group = dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    state = rank_state(cut(rank, size), rank)
    for step in range(repeat):
        checkpoint = save(Folder(where), step, state, info={"ranks": size}, group=group)
    return sorted(checkpoint.manifest.files)


def _load(where: str, cut: Any) -> None:
    group = dist.new_group(backend="gloo")
    box = cut(dist.get_rank(), dist.get_world_size())
    parts = empty("model/w", box)
    if dist.get_rank() == 0:  # a name that only one rank asks for
        parts["model/bias"] = whole_part(torch.zeros(7))
        assert Folder(where).get(0).read_object("random/1")["rank"] == 1
    else:
        parts["model/bias"] = Part((7,), torch.float32, ())
    load(Folder(where).get(0), parts, group)
    assert_same(parts["model/w"].pieces[0].tensor.contiguous(), FULL[box.slices()].contiguous())
    if dist.get_rank() == 0:
        assert_same(parts["model/bias"].pieces[0].tensor, torch.ones(7))


def test_saved_on_four_ranks_loaded_on_two_and_the_other_way_round(
    ranks: Any, tmp_path: Path
) -> None:
    four, two = str(tmp_path / "four"), str(tmp_path / "two")
    files = ranks(_save, four, rows, world_size=4)
    assert [re.sub("-.{8}[.]", ".", name) for name in files[0]] == [
        f"rank-{rank:05d}.bin" for rank in range(4)
    ]
    ranks(_save, two, columns, world_size=2)
    ranks(_load, four, columns, world_size=2)
    ranks(_load, two, rows, world_size=4)
    assert_same(whole_w(Folder(four).get(0)), FULL)
    assert Folder(two).get(0).manifest.info == {"ranks": 2}


def _save_in_part_of_the_world(where: str) -> None:
    group = dist.new_group([1, 2], backend="gloo")
    if dist.get_rank() == 0:
        # Meanwhile the default group is free for others, with ranks that take no part in it.
        dist.broadcast(torch.ones(3), 0)
        return
    rank = dist.get_rank(group)
    save(Folder(where), 0, rank_state(rows(rank, 2), rank), info={}, group=group)
    dist.broadcast(torch.ones(3), 0)


@pytest.mark.world(3)
def test_only_the_group_takes_part(ranks: Any, tmp_path: Path) -> None:
    ranks(_save_in_part_of_the_world, str(tmp_path))
    assert_same(whole_w(Folder(tmp_path).get(0)), FULL)


class Odd(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def odd(_: Path, chunks: Iterable[memoryview]) -> Iterable[memoryview]:
    raise Odd(1, 2)


def _fail_on_one_rank(where: str) -> list[str]:
    group = dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    state, messages = rank_state(rows(rank, size), rank), []

    def refused(folder: Folder, state: RankState) -> None:
        with pytest.raises(CheckpointError) as failed:
            save(folder, 7, state, info={}, group=group)
        messages.append(str(failed.value))

    save(Folder(where), 5, state, info={}, group=group)
    for fault in (no_space, odd):
        refused(faulty(where, fault) if rank == 1 else Folder(where), state)
        dist.barrier(group)
        assert os.listdir(where) == ["step-000000005"]
    refused(Folder(where), RankState(state.tensors, {"loop": 1}))
    lacking = RankState({} if rank == 1 else state.tensors)
    refused(Folder(where), lacking)
    dist.barrier(group)
    assert os.listdir(where) == ["step-000000005"]
    save(Folder(where), 7, state, info={}, group=group)  # the group is as good as before
    dist.barrier(group)
    damaged = next(Path(where, "step-000000007").glob("rank-00001*"))
    if rank == 0:
        damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    dist.barrier(group)
    with pytest.raises(CheckpointError) as failed:
        load(Folder(where).get(7), empty("model/w", rows(rank, size)), group)
    return [*messages, str(failed.value)]


@pytest.mark.world(2)
def test_all_ranks_fail_alike_and_earlier_checkpoints_stay(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(_fail_on_one_rank, str(tmp_path))
    assert first == second
    full, strange, twice, lacking, damaged = first
    assert re.search(r"saving step 7 .* failed on rank 1: cannot write .*No space left", full)
    assert re.search(r"failed on rank 1: Odd: 1 and 2", strange)
    assert re.search(r"object 'loop' is given by rank 0 and by rank 1", twice)
    assert re.search(r"'model/w' of shape \(12, 5\): .* 30 of its 60 elements", lacking)
    assert re.search(r"loading .* failed on rank 1: .*rank-00001-.*bin is damaged", damaged)
    assert_same(whole_w(Folder(tmp_path).get(5)), FULL)


def _save_to_different_disks(where: str) -> None:
    group = dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(CheckpointError, match=r"on rank 1: .*rank 0 has made, is not there on "):
        save(Folder(f"{where}/{rank}"), 7, rank_state(rows(rank, size), rank), info={}, group=group)


@pytest.mark.world(2)
def test_ranks_that_do_not_share_a_disk_are_told_so(ranks: Any, tmp_path: Path) -> None:
    ranks(_save_to_different_disks, str(tmp_path))
    assert not Folder(tmp_path / "0").checkpoints()


def kill(_: Path, chunks: Iterable[memoryview]) -> Iterable[memoryview]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from chunks


def _die_while_saving(where: str) -> None:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=100))
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = faulty(where, kill) if rank == size - 1 else Folder(where)
    began = time.monotonic()
    try:
        save(folder, 7, rank_state(rows(rank, size), rank), info={}, group=group)
    except CheckpointError as error:
        Path(where, f"said-{rank}").write_text(f"{time.monotonic() - began:.1f} {error}")


@pytest.mark.world(3)
def test_a_rank_that_dies_while_saving_fails_the_save_of_the_others(
    ranks: Any, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks(_die_while_saving, str(tmp_path))
    assert (failed.value.rank, failed.value.exit_code) == (2, -signal.SIGKILL)
    seconds, said = (tmp_path / "said-0").read_text().split(" ", 1)
    assert float(seconds) < 50, "known at once, not when the group gives up"
    assert re.search(r"saving step 7 .* failed: another rank did not answer", said)
    assert not Folder(tmp_path).checkpoints()


# Killed at any line of the code: the checkpoint is there whole, or not at all.

_KILLED = """
import os, signal, sys
import torch
import paceline.checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import RankState, whole_part
from paceline.checkpoint.sharded.save_load import save as save_state

inside = os.path.dirname(paceline.checkpoint.__file__)

def save(where, step, value):
    tensors = {f"t{i}": whole_part(torch.full((30,), value)) for i in range(3)}
    state = RankState(tensors, {"loop": {"value": value}})
    save_state(Folder(where), step, state, info={}, group=None)

def killed_at(line, where):
    # Saves in a child that is killed at this line; false when it got through.
    child = os.fork()
    if child == 0:
        count = 0
        def trace(frame, event, arg):
            nonlocal count
            if not frame.f_code.co_filename.startswith(inside):
                return None
            if event == "line":
                count += 1
                if count == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        save(where, 2, float(line))
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL

def check(where, line, allowed):
    # Every checkpoint is whole, and holds one of the values it may; those of step 2.
    found = {}
    for checkpoint in Folder(where).checkpoints():
        assert not checkpoint.damages(), (line, checkpoint.damages())
        value = found[checkpoint.step] = checkpoint.read_object("loop")["value"]
        for name in ("t0", "t1", "t2"):
            assert bool((checkpoint.read_tensor(name) == value).all()), line
    assert found.pop(1) == -1.0
    assert found.get(2) in allowed, (line, found)
    return found.get(2)

def run(where, resave):
    save(where, 1, -1.0)
    line, tried, saved = 1, 0, 0
    while True:
        Folder(where).remove(Folder(where).get(2))
        if resave:
            save(where, 2, -2.0)
        if not killed_at(line, where):
            break
        saved += check(where, line, [-2.0 if resave else None, float(line)]) == line
        tried += 1
        line += 41
    check(where, line, [float(line)])
    names = set(os.listdir(os.path.join(where, "step-000000002")))
    assert names == {"manifest.json", *Folder(where).get(2).manifest.files}, names
    print(tried, saved)

run(sys.argv[1], resave=False)
run(sys.argv[2], resave=True)
"""


def test_killed_at_any_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _KILLED, str(tmp_path / "1"), str(tmp_path / "2")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        tried, saved = map(int, line.split())
        assert tried > 10
        assert saved < tried
