"""A checkpoint's bytes: all of them come back, and no wrong one ever does."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_checkpoints import put_checkpoint, put_file, put_manifest
from torch import Tensor

from paceline.checkpoint.block_reader import BlockReader
from paceline.checkpoint.boxes import Box
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.hashing import FileEntry
from paceline.checkpoint.manifest import (
    Manifest,
    ObjectEntry,
    Stored,
    TensorEntry,
    name_of,
    step_of,
)
from paceline.checkpoint.tensor_bytes import memory_of
from paceline.errors import CheckpointDamaged, CheckpointError, StorageError

DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
# Those without values of their own: quantised ones need a scale, and sub-byte ones have no memory.
DTYPES = sorted(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in DTYPES
        if not str(dtype).startswith(("torch.q", "torch.bits", "torch.int", "torch.uint"))
        or str(dtype)
        in {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    }.items()
)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints")


def example() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model/w": torch.randn(9, 7, generator=generator),
        "model/steps": torch.tensor(41),
        "optimizer/w/exp_avg": torch.randn(9, 7, generator=generator, dtype=torch.float64),
        "model/nothing": torch.empty(0, 4),
    }


OBJECTS = {"engine": {"scale": 2.0, "names": ["a", "b"]}, "random/0": torch.arange(5)}


def fresh(checkpoint: Checkpoint) -> Checkpoint:
    """As another process would see it."""
    return Checkpoint(checkpoint.storage, checkpoint.name)


def read_all(checkpoint: Checkpoint) -> None:
    checkpoint = fresh(checkpoint)
    for name in checkpoint.manifest.tensors:
        checkpoint.read_tensor(name)
    for name in checkpoint.manifest.objects:
        checkpoint.read_object(name)


class TestRoundTrip:
    @pytest.mark.parametrize("ranks", [1, 2, 5])
    def test_tensors_and_objects(self, folder: Folder, ranks: int) -> None:
        tensors = example()
        put_checkpoint(folder, 12, tensors, OBJECTS, ranks=ranks)
        checkpoint = folder.get(12)
        for name, tensor in tensors.items():
            found = checkpoint.read_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
        assert checkpoint.read_object("engine") == OBJECTS["engine"]
        assert torch.equal(checkpoint.read_object("random/0"), torch.arange(5))
        assert checkpoint.step == checkpoint.manifest.step == 12
        assert checkpoint.damages() == []

    @pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=[name for name, _ in DTYPES])
    def test_every_dtype_to_the_bit(self, folder: Folder, name: str, dtype: torch.dtype) -> None:
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,))
        tensor = bits.to(torch.uint8).view(dtype).reshape(3, 2)
        put_checkpoint(folder, 1, {"x": tensor})
        found = folder.get(1).read_tensor("x")
        assert folder.get(1).manifest.tensors["x"].dtype == name
        assert found.dtype == dtype
        assert memory_of(found) == memory_of(tensor)

    @pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=[name for name, _ in DTYPES])
    def test_columns_of_every_dtype(self, folder: Folder, name: str, dtype: torch.dtype) -> None:
        """What one rank holds is not in one stretch in the whole tensor."""
        data = bytes(i % 2 for i in range(6 * dtype.itemsize))
        half, size = len(data) // 2, dtype.itemsize
        columns = (
            Stored(Box((0, 0), (3, 1)), "f", 0, half),
            Stored(Box((0, 1), (3, 1)), "f", half, half),
        )
        folder.storage.make_folder(name_of(1))
        entry = put_file(folder.storage, f"{name_of(1)}/f", [data])
        tensors = {"x": TensorEntry((3, 2), name, columns)}
        put_manifest(folder, 1, Manifest(1, {}, {"f": entry}, tensors))
        rows = [data[at : at + size] + data[half + at :][:size] for at in range(0, half, size)]
        assert memory_of(folder.get(1).read_tensor("x")) == b"".join(rows)

    def test_boxes_along_any_dimension(self, folder: Folder) -> None:
        whole = torch.arange(24.0).reshape(4, 6)
        halves = [(Box((0, 0), (4, 2)), whole[:, :2]), (Box((0, 2), (4, 4)), whole[:, 2:])]
        data = [bytes(memory_of(piece.contiguous())) for _, piece in halves]
        folder.storage.make_folder(name_of(3))
        entry = put_file(folder.storage, f"{name_of(3)}/f", data, 16)
        stored = (
            Stored(halves[0][0], "f", 0, len(data[0])),
            Stored(halves[1][0], "f", len(data[0]), len(data[1])),
        )
        tensors = {"x": TensorEntry((4, 6), "float32", stored)}
        put_manifest(folder, 3, Manifest(3, {}, {"f": entry}, tensors))
        assert torch.equal(folder.get(3).read_tensor("x"), whole)

        put_manifest(
            folder,
            3,
            Manifest(3, {}, {"f": entry}, {"x": TensorEntry((4, 6), "float32", stored[:1])}),
        )
        with pytest.raises(CheckpointError, match="lacks 16 of the 24 elements of 'x'"):
            folder.get(3).read_tensor("x")

    def test_nothing_at_all(self, folder: Folder) -> None:
        put_checkpoint(folder, 0, ranks=0)
        assert folder.get(0).damages() == []
        assert [c.step for c in folder.checkpoints()] == [0]

    def test_ranks_with_nothing_to_write(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 5, {"one": torch.tensor(1.5)}, ranks=3)
        assert [f.size for f in checkpoint.manifest.files.values()] == [64, 0, 0]
        assert checkpoint.damages() == []
        assert checkpoint.read_tensor("one") == 1.5

    def test_a_renamed_copy_is_read_by_its_own_name(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 12, example())
        copy = Path(folder.where) / "the best"
        shutil.copytree(checkpoint.path, copy)
        assert Checkpoint.at(copy).step == 12
        assert Checkpoint.at(f"{copy}/").damages() == []

    def test_kept_open_reads_a_block_once(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensors = {f"t{i}": torch.full((3,), float(i)) for i in range(40)}
        put_checkpoint(folder, 1, tensors, ranks=1, block=1024 * 1024)
        reads = []
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda *a: reads.append(a[2]) or real(*a))
        with folder.get(1).kept_open() as checkpoint:
            checkpoint.manifest  # noqa: B018
            reads.clear()
            found = {name: checkpoint.read_tensor(name) for name in tensors}
        assert len(reads) == 1
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)

    def test_more_files_than_are_kept_open(self, folder: Folder) -> None:
        tensor = torch.arange(40)
        put_checkpoint(folder, 1, {"x": tensor, "y": -tensor}, ranks=20)
        with folder.get(1).kept_open() as checkpoint:
            assert torch.equal(checkpoint.read_tensor("x"), tensor)
            assert torch.equal(checkpoint.read_tensor("y"), -tensor)
            assert 0 < len(_open_files(checkpoint.path)) < 12
        assert _open_files(checkpoint.path) == []

    def test_names_that_are_not_there(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 1, {"x": torch.ones(2)}, {"loop": 1})
        with pytest.raises(CheckpointError, match="holds no tensor 'y'"):
            checkpoint.read_tensor("y")
        with pytest.raises(CheckpointError, match="holds no object 'engine'; it has loop"):
            checkpoint.read_object("engine")
        with pytest.raises(CheckpointError, match="has no file 'z'"):
            checkpoint.reader("z")


def test_memory_is_the_tensor_s_own() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    memory_of(tensor[1])[0] = 7
    assert tensor[1, 0] == 7
    assert len(memory_of(torch.empty(0, 3))) == 0
    assert len(memory_of(torch.tensor(True))) == 1
    with pytest.raises(ValueError, match="make it contiguous"):
        memory_of(tensor.T)


def test_names_of_steps() -> None:
    assert name_of(12) == "step-000000012"
    assert step_of("step-000000012") == 12
    assert step_of(name_of(12_345_678_901)) == 12_345_678_901
    for other in ("step-12", "step-000000012.pt", "step-0000000000012", "xstep-000000012", ".lock"):
        assert step_of(other) is None


def one_file(where: str | Path, content: bytes, block: int) -> BlockReader:
    folder = Folder(where)
    folder.storage.make_folder(name_of(1))
    entry = put_file(folder.storage, f"{name_of(1)}/f", [content], block)
    put_manifest(folder, 1, Manifest(1, {}, {"f": entry}))
    return folder.get(1).reader("f")


class TestBlockReader:
    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_any_range(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(1, 40))
        content = bytes(range(256))[: data.draw(st.integers(0, 200))]
        with tempfile.TemporaryDirectory() as place, one_file(place, content, block) as reader:
            for _ in range(8):
                start = data.draw(st.integers(0, len(content)))
                end = data.draw(st.integers(start, len(content)))
                assert reader.read(start, end - start) == content[start:end]

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_any_ranges_at_once(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(1, 40))
        content = bytes(range(256))[: data.draw(st.integers(0, 256))]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=30)))
        wanted = [(a, b) for a, b in itertools.pairwise(cuts) if data.draw(st.booleans())]
        if wanted and data.draw(st.integers(0, 9)) == 0:
            wanted.append(wanted[-1])  # two want the same
        with tempfile.TemporaryDirectory() as place, one_file(place, content, block) as reader:
            for _ in range(2):
                targets = [(a, memoryview(bytearray(b - a))) for a, b in wanted]
                reader.scatter(targets)
                assert [bytes(into) for _, into in targets] == [content[a:b] for a, b in wanted]
                reader.read(0, len(content) // 2)  # the two may be mixed

    def test_damage_is_found_in_every_block_that_is_wanted(self, tmp_path: Path) -> None:
        content = bytes(range(200))
        wanted = [(3, 50), (50, 61), (100, 110), (130, 190)]
        read = {at for a, b in wanted for at in range(a // 16 * 16, -(-b // 16) * 16)}
        for at in range(200):
            with one_file(tmp_path / str(at), content, 16) as reader:
                flip(Path(reader.path), at)
                targets = [(a, memoryview(bytearray(b - a))) for a, b in wanted]
                if at in read:
                    said = f"damaged: block at byte {at // 16 * 16}: expected .*, found"
                    with pytest.raises(CheckpointDamaged, match=said):
                        reader.scatter(targets)
                else:
                    reader.scatter(targets)

    def test_more_places_than_the_system_takes_at_once(self, tmp_path: Path) -> None:
        content = bytes(range(250)) * 60
        with one_file(tmp_path, content, 5000) as reader:
            targets = [(at, memoryview(bytearray(1))) for at in range(0, len(content), 2)]
            reader.scatter(targets)
        assert b"".join(bytes(into) for _, into in targets) == content[::2]

    def test_a_file_cut_while_many_ranges_are_read(self, tmp_path: Path) -> None:
        with one_file(tmp_path, bytes(200), 16) as reader:
            os.truncate(reader.path, 70)
            with pytest.raises(CheckpointDamaged, match=r"damaged: expected 200 bytes, found 70"):
                reader.scatter([(20, memoryview(bytearray(170)))])

    def test_ranges_beyond_the_end(self, tmp_path: Path) -> None:
        with (
            one_file(tmp_path, bytes(200), 16) as reader,
            pytest.raises(CheckpointError, match="it has 200"),
        ):
            reader.scatter([(0, memoryview(bytearray(30))), (190, memoryview(bytearray(11)))])

    def test_a_range_beyond_the_end(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 1, {"x": torch.ones(2)}, ranks=1)
        with checkpoint.reader("rank-00000-0a1b2c3d.bin") as reader:
            for start, length in ((0, 65), (-1, 2)):
                with pytest.raises(CheckpointError, match="it has 64"):
                    reader.read(start, length)

    def test_a_file_cut_while_it_is_open(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 1, {"x": torch.ones(100)}, ranks=1)
        file = next(iter(checkpoint.manifest.files))
        with checkpoint.reader(file) as reader:
            os.truncate(f"{checkpoint.path}/{file}", 70)
            with pytest.raises(CheckpointError, match=r"damaged: expected 448 bytes, found 70"):
                reader.read(64, 100)

    def test_a_damaged_block_is_not_handed_out_at_the_second_try(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 1, {"x": torch.ones(100)}, ranks=1)
        file = next(iter(checkpoint.manifest.files))
        flip(Path(checkpoint.path) / file, 70)
        with checkpoint.reader(file) as reader:
            assert len(reader.read(0, 64)) == 64  # another block is still good
            for _ in range(2):
                with pytest.raises(CheckpointError, match="damaged: block at byte 64: expected"):
                    reader.read(66, 10)


def flip(path: Path, at: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


def _flipped(path: Path, chance: random.Random) -> None:
    flip(path, chance.randrange(path.stat().st_size), 1 << chance.randrange(8))


def _truncated(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _longer(path: Path, chance: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(bytes(chance.randrange(1, 200)))


def _missing(path: Path, chance: random.Random) -> None:
    path.unlink()


def _zero_tail(path: Path, chance: random.Random) -> None:
    """What a power cut leaves of a file that was not flushed: its size is right."""
    data = path.read_bytes()
    keep = chance.randrange(len(data.rstrip(b"\0")))
    path.write_bytes(data[:keep] + bytes(len(data) - keep))


def _swapped(path: Path, chance: random.Random) -> None:
    other = next(p for p in sorted(path.parent.glob("*.bin")) if p != path)
    temporary = path.with_name("swap")
    path.rename(temporary)
    other.rename(path)
    temporary.rename(other)


DAMAGES = [_flipped, _truncated, _longer, _missing, _zero_tail, _swapped]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_is_found_wherever_it_is(
        self, folder: Folder, tmp_path: Path, damage: Callable[[Path, random.Random], None]
    ) -> None:
        good = put_checkpoint(folder, 7, example(), OBJECTS)
        kept = tmp_path / "kept"
        shutil.copytree(good.path, kept)
        chance = random.Random(0)
        for _ in range(30):
            shutil.rmtree(good.path)
            shutil.copytree(kept, good.path)
            file = chance.choice(sorted(good.manifest.files))
            damage(Path(good.path) / file, chance)
            found = fresh(good).damages()
            assert file in {one.file for one in found}
            assert all("expected" in str(one) and "found" in str(one) for one in found)
            with pytest.raises(CheckpointError, match="damaged"):
                read_all(good)

    def test_is_named_by_file_place_expected_and_found(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 7, {"x": torch.ones(64)})
        first, second = sorted(checkpoint.manifest.files)
        flip(Path(checkpoint.path) / first, 65)
        os.truncate(f"{checkpoint.path}/{second}", 100)
        block, size = checkpoint.damages()
        expected = checkpoint.manifest.files[first].hashes[1]
        assert (block.file, block.what, block.expected) == (first, "block at byte 64", expected)
        assert str(block) == (
            f"{first} is damaged: block at byte 64: expected {expected}, found {block.found}."
        )
        assert str(size) == f"{second} is damaged: size: expected 128 bytes, found 100 bytes."
        (Path(checkpoint.path) / second).unlink()
        assert str(checkpoint.damages()[1]) == (
            f"{second} is damaged: missing: expected 128 bytes, found no such file."
        )

    def test_some_files_alone(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 7, {"x": torch.ones(64)})
        first, second = sorted(checkpoint.manifest.files)
        flip(Path(checkpoint.path) / second, 0)
        assert checkpoint.damages(files=[first]) == []
        assert [d.file for d in checkpoint.damages(files=[second])] == [second]

    def test_progress_counts_every_byte(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 7, example(), OBJECTS, ranks=3)
        (Path(checkpoint.path) / sorted(checkpoint.manifest.files)[1]).unlink()
        told: list[int] = []
        checkpoint.damages(told.append)
        assert sum(told) == checkpoint.manifest.size

    def test_a_check_that_is_interrupted_does_not_go_on(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 7, {"x": torch.ones(64 * 200)}, ranks=8)
        checkpoint.storage.read_span = 64
        told: list[int] = []

        def progress(count: int) -> None:
            told.append(count)
            if len(told) == 20:
                raise KeyboardInterrupt
            time.sleep(0.001 if len(told) < 20 else 0.05)  # time for all to hear of it

        with pytest.raises(KeyboardInterrupt):
            checkpoint.damages(progress)
        assert len(told) < 200  # of 800

    def test_something_else_under_the_name_of_a_file(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 7, {"x": torch.ones(64)})
        pipe, other = (Path(checkpoint.path) / name for name in sorted(checkpoint.manifest.files))
        pipe.unlink()
        os.mkfifo(pipe)  # opening it would wait for ever
        other.unlink()
        other.mkdir()
        assert [damage.what for damage in checkpoint.damages()] == ["missing", "missing"]
        with pytest.raises(CheckpointError, match="damaged: missing"):
            read_all(checkpoint)

    def test_an_unreadable_medium_is_damage_but_a_refusal_is_not(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = put_checkpoint(folder, 7, {"x": torch.ones(64)}, ranks=1)
        checkpoint.manifest  # noqa: B018

        def failing(number: int) -> Callable[..., Any]:
            def preadv(*_: object) -> int:
                raise OSError(number, os.strerror(number))

            return preadv

        monkeypatch.setattr(os, "preadv", failing(errno.EIO))
        (damage,) = checkpoint.damages()
        assert "Input/output error" in str(damage)
        assert "Input/output error" in str(fresh(checkpoint).damages()[0])  # of the manifest
        monkeypatch.setattr(os, "preadv", failing(errno.EACCES))
        for one in (checkpoint, fresh(checkpoint)):
            with pytest.raises(StorageError, match="Permission denied"):
                one.damages()


class TestManifest:
    def test_every_flipped_bit_is_noticed(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = put_checkpoint(folder, 7, {"x": torch.ones(3)}, {"loop": 1}, ranks=1)
        good = (Path(checkpoint.path) / "manifest.json").read_bytes()
        for at in range(len(good)):
            data = bytearray(good)
            data[at] ^= 1 << (at % 8)
            monkeypatch.setattr(folder.storage, "read_bytes", lambda _, data=data: bytes(data))
            with pytest.raises(CheckpointError, match=r"manifest.json"):
                fresh(checkpoint).manifest  # noqa: B018
            if at % 16 == 0:
                assert [damage.file for damage in fresh(checkpoint).damages()] == ["manifest.json"]

    def test_cut_short_anywhere_or_longer(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = put_checkpoint(folder, 7, {"x": torch.ones(3)}, ranks=1)
        good = (Path(checkpoint.path) / "manifest.json").read_bytes()
        for wrong in (*(good[:length] for length in range(len(good))), good + b"\n", good + good):
            monkeypatch.setattr(folder.storage, "read_bytes", lambda _, wrong=wrong: wrong)
            with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
                fresh(checkpoint).manifest  # noqa: B018

    def test_the_step_is_known_all_the_same(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 7)
        (Path(checkpoint.path) / "manifest.json").write_bytes(b"")
        assert fresh(checkpoint).step == 7

    def test_of_another_step(self, folder: Folder) -> None:
        put_checkpoint(folder, 6, example())
        checkpoint = put_checkpoint(folder, 7, example())
        stale = folder.storage.read_bytes(f"{name_of(6)}/manifest.json")
        folder.storage.replace(f"{name_of(7)}/manifest.json", stale)
        with pytest.raises(CheckpointError, match="of another checkpoint: expected step 7, found"):
            fresh(checkpoint).manifest  # noqa: B018

    def test_of_an_older_save_of_the_same_step(self, folder: Folder) -> None:
        put_checkpoint(folder, 7, example(), token="00000001")
        path = f"{name_of(7)}/manifest.json"
        stale = folder.storage.read_bytes(path)
        for name in folder.get(7).manifest.files:
            folder.storage.delete(f"{name_of(7)}/{name}")
        put_checkpoint(folder, 7, example(), token="00000002")
        assert folder.get(7).damages() == []
        folder.storage.replace(path, stale)
        assert [d.what for d in folder.get(7).damages()] == ["missing", "missing"]
        with pytest.raises(CheckpointError, match=r"00000001.bin is damaged: missing"):
            read_all(folder.get(7))

    def test_missing(self, folder: Folder) -> None:
        folder.storage.make_folder(name_of(7))
        with pytest.raises(CheckpointError, match=r"holds no manifest.json.*never finished"):
            folder.get(7).manifest  # noqa: B018

    @pytest.mark.parametrize(
        "name",
        ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "x\0", "manifest.json", ".lock"],
    )
    def test_files_stay_in_their_folder(self, folder: Folder, name: str) -> None:
        folder.storage.make_folder(name_of(7))
        put_manifest(folder, 7, Manifest(7, {}, {name: FileEntry(0, ())}))
        with pytest.raises(CheckpointError, match="does not stay in this folder"):
            folder.get(7).manifest  # noqa: B018

    def test_that_contradicts_itself(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 7, {"x": torch.ones(3)}, {"loop": 1}, ranks=1)
        good = checkpoint.manifest
        (file,) = good.files
        beyond = ObjectEntry(file, 10_000, 5)
        for wrong, says in (
            (replace(good, objects={"loop": beyond}), "'loop' is said to be beyond the end"),
            (replace(good, objects={"loop": ObjectEntry(file, -4, 2)}), "start must be a whole"),
            (replace(good, objects={"loop": ObjectEntry("no", 0, 1)}), "'no', which is not one"),
            (replace(good, files={file: FileEntry(9, ())}), "of 9 bytes has 0 hashes"),
            (replace(good, files={file: FileEntry(9, ("00",), 0)}), "has 1 hashes"),
        ):
            put_manifest(folder, 7, wrong)
            with pytest.raises(CheckpointError, match=says):
                folder.get(7).manifest  # noqa: B018

    def test_whose_tensor_does_not_fit_its_bytes(self, folder: Folder) -> None:
        good = put_checkpoint(folder, 7, {"x": torch.ones(8)}, ranks=1).manifest
        entry = good.tensors["x"]
        for wrong, says in (
            (replace(entry, dtype="float64"), "32 bytes for elements that take 64"),
            (replace(entry, dtype="save"), "no dtype 'save'"),
            (replace(entry, shape=(5,)), r"\[8\] at \[0\] are not inside of its shape \[5\]"),
        ):
            put_manifest(folder, 7, replace(good, tensors={"x": wrong}))
            with pytest.raises(CheckpointError, match=says):
                folder.get(7).read_tensor("x")


class _Ran:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_loading_executes_no_code(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put_checkpoint(folder, 1, objects={"loop": _Ran()})
    folder.storage.make_folder(name_of(2))
    data = pickle.dumps(_Ran())
    entry = put_file(folder.storage, f"{name_of(2)}/f", [data])
    objects = {"loop": ObjectEntry("f", 0, len(data))}
    put_manifest(folder, 2, Manifest(2, {}, {"f": entry}, {}, objects))
    for step in (1, 2):
        with pytest.raises(CheckpointError, match=r"'loop' of .* without executing code"):
            folder.get(step).read_object("loop")
    assert not (tmp_path / "executed").exists()


def _open_files(folder: str) -> list[str]:
    """The files in ``folder`` that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            found.append(os.readlink(descriptor))
    return [name for name in found if name.startswith(f"{os.path.realpath(folder)}/")]
