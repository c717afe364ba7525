"""The checkpoints of a run: found, chosen, deleted, and never mixed up with another run's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from plain_checkpoints import put_checkpoint

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.manifest import name_of
from paceline.checkpoint.retention import Entry, Keep
from paceline.errors import CheckpointError, StorageError


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> Folder:
    return Folder(tmp_path / "checkpoints" if request.param == "local" else memory_url)


@pytest.fixture
def local(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints")


def steps(folder: Folder) -> list[int]:
    return [checkpoint.step for checkpoint in folder.checkpoints()]


def damage(folder: Folder, step: int) -> str:
    """Flip a byte; the name of the file."""
    checkpoint = folder.get(step)
    file = next(name for name, entry in checkpoint.manifest.files.items() if entry.size)
    path = f"{checkpoint.name}/{file}"
    data = bytearray(folder.storage.read_bytes(path))
    data[0] ^= 255
    folder.storage.replace(path, bytes(data))
    return file


class TestListing:
    def test_nothing_yet(self, folder: Folder) -> None:
        assert folder.checkpoints() == folder.unfinished() == folder.old_format() == []
        assert folder.newest_good() is None

    def test_oldest_first_by_number(self, folder: Folder) -> None:
        for step in (1_000_000_000, 999_999_999, 5, 12):
            put_checkpoint(folder, step)
        assert steps(folder) == [5, 12, 999_999_999, 1_000_000_000]

    def test_unfinished_ones_are_not_checkpoints(self, folder: Folder) -> None:
        put_checkpoint(folder, 5)
        folder.storage.make_folder(name_of(6))
        folder.storage.create(f"{name_of(6)}/rank-00000-00000000.bin", [memoryview(b"x")])
        assert steps(folder) == [5]
        assert folder.unfinished() == [name_of(6)]

    def test_other_things_in_the_folder_are_left_alone(self, local: Folder) -> None:
        put_checkpoint(local, 5)
        for name in ("step-7", "notes", "step-000000007.old"):
            local.storage.make_folder(name)
        local.storage.replace("best.txt", b"mine")
        with local.lock("test"):
            assert local.clean() == []
        assert steps(local) == [5]
        assert {"step-7", "notes", "step-000000007.old", "best.txt"} < set(local.storage.names())

    def test_files_of_the_first_version_are_noticed(self, local: Folder) -> None:
        local.storage.make_folder()
        for name in ("step-000000012.pt", "best.pt"):
            local.storage.replace(name, b"torch")
        assert local.old_format() == ["best.pt", "step-000000012.pt"]
        assert local.checkpoints() == local.unfinished() == []

    def test_the_clock_plays_no_part(self, local: Folder) -> None:
        for step in (30, 20, 10):
            put_checkpoint(local, step)
            path = Path(local.where) / name_of(step) / "manifest.json"
            os.utime(path, (2_000_000_000 - step,) * 2)
        newest = local.newest_good()
        assert newest is not None
        assert newest.step == 30


class TestNewestGood:
    def test_steps_over_what_is_damaged_and_says_so(self, folder: Folder) -> None:
        for step in (10, 20, 30, 40):
            put_checkpoint(folder, step, {"x": torch.ones(9)})
        file = damage(folder, 40)
        folder.storage.replace(f"{name_of(30)}/manifest.json", b"{")
        told: list[tuple[int, str]] = []
        found = folder.newest_good(lambda checkpoint, what: told.append((checkpoint.step, what)))
        assert found is not None
        assert found.step == 20
        assert [step for step, _ in told] == [40, 30]
        assert told[0][1].startswith(f"checkpoint {folder.get(40).path}: {file} is damaged: block")
        assert "manifest.json is damaged" in told[1][1]
        assert steps(folder) == [10, 20, 30, 40]  # nothing is deleted

    def test_a_missing_file_too(self, folder: Folder) -> None:
        for step in (10, 20):
            put_checkpoint(folder, step, {"x": torch.ones(9)})
        for file in folder.get(20).manifest.files:
            folder.storage.delete(f"{name_of(20)}/{file}")
        told: list[str] = []
        found = folder.newest_good(lambda _, what: told.append(what))
        assert found is not None
        assert found.step == 10
        assert "missing: expected" in told[0]
        assert told[0].endswith("And 1 more like this.")

    def test_none_good_is_an_error(self, folder: Folder) -> None:
        for step in (10, 20):
            put_checkpoint(folder, step, {"x": torch.ones(9)})
            damage(folder, step)
        told: list[int] = []
        with pytest.raises(CheckpointError, match=r"no older one to go on from.*another run_dir"):
            folder.newest_good(lambda checkpoint, _: told.append(checkpoint.step))
        assert told == [20, 10]

    def test_a_storage_that_refuses_is_not_stepped_over(
        self, local: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for step in (10, 20):
            put_checkpoint(local, step, {"x": torch.ones(9)})

        def refused(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "preadv", refused)
        with pytest.raises(StorageError, match="Permission denied"):
            local.newest_good()

    def test_progress(self, folder: Folder) -> None:
        checkpoint = put_checkpoint(folder, 10, {"x": torch.ones(900)})
        told: list[int] = []
        folder.newest_good(progress=told.append)
        assert sum(told) == checkpoint.manifest.size > 0


class TestRemoving:
    def test_leaves_nothing(self, folder: Folder) -> None:
        for step in (10, 20):
            put_checkpoint(folder, step, {"x": torch.ones(9)})
        folder.remove(folder.get(10))
        assert folder.storage.names() == [name_of(20)]
        folder.remove(folder.get(10))  # gone already

    def test_half_of_one_never_looks_whole(
        self, local: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = put_checkpoint(local, 10, {"x": torch.ones(9)})

        def killed(path: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(local.storage, "delete_folder", killed)
        with pytest.raises(KeyboardInterrupt):
            local.remove(checkpoint)
        assert local.checkpoints() == []
        assert local.unfinished() == [name_of(10)]

    def test_a_damaged_one_can_be_removed(self, folder: Folder) -> None:
        put_checkpoint(folder, 10)
        folder.storage.replace(f"{name_of(10)}/manifest.json", b"")
        folder.remove(folder.get(10))
        assert folder.storage.names() == []


class TestCleaning:
    def test_takes_the_lock(self, folder: Folder) -> None:
        folder.storage.make_folder(name_of(6))
        with pytest.raises(CheckpointError, match="not locked by this run"):
            folder.clean()
        with folder.lock("test"):
            folder.clean()
        with pytest.raises(CheckpointError, match="lock"):
            folder.clean()

    def test_what_killed_runs_left(self, local: Folder) -> None:
        put_checkpoint(local, 5, {"x": torch.ones(9)}, token="00000001")
        first = sorted(local.get(5).manifest.files)
        put_checkpoint(local, 5, {"x": torch.ones(9)}, token="00000002")  # killed before deleting
        local.storage.make_folder(name_of(6))
        local.storage.create(f"{name_of(6)}/rank-00000-00000003.bin", [memoryview(b"half")])
        for name in (f"{name_of(5)}/.manifest.json.0a1b2c3d.tmp", ".x.0a1b2c3d.tmp"):
            (Path(local.where) / name).write_bytes(b"half")
        put_checkpoint(local, 7, {"x": torch.ones(9)})
        local.storage.replace(f"{name_of(7)}/manifest.json", b"damaged")
        before = local.storage.names(name_of(7))
        with local.lock("test"):
            assert sorted(local.clean()) == sorted(
                [
                    name_of(6),
                    ".x.0a1b2c3d.tmp",
                    f"{name_of(5)}/.manifest.json.0a1b2c3d.tmp",
                    *(f"{name_of(5)}/{name}" for name in first),
                ]
            )
            assert local.clean() == []
        assert local.get(5).damages() == []
        assert local.storage.names(name_of(7)) == before
        assert local.storage.names() == [name_of(5), name_of(7)]


class TestPruning:
    def test_by_what_the_manifests_say(self, folder: Folder) -> None:
        for step, loss in ((10, 0.3), (20, 0.1), (30, 0.2), (40, 0.4)):
            put_checkpoint(folder, step, metrics={"loss": loss})
        assert folder.entries()[1] == Entry(20, {"loss": 0.1})
        assert folder.prune(Keep(last=1, best=1, metric="loss")) == [10, 30]
        assert steps(folder) == [20, 40]

    def test_save_after_save(self, folder: Folder) -> None:
        keep = Keep(last=2, best=1, metric="loss")
        for step, loss in ((10, 0.1), (20, 0.3), (30, 0.2), (40, 0.25), (50, 0.05), (60, 0.9)):
            put_checkpoint(folder, step, metrics={"loss": loss})
            folder.prune(keep, newest=step)
        assert steps(folder) == [50, 60]

    def test_a_step_saved_again_counts_as_it_is_now(self, folder: Folder) -> None:
        keep = Keep(last=1, best=1, metric="loss")
        put_checkpoint(folder, 10, metrics={"loss": 0.1})
        folder.prune(keep, newest=10)
        put_checkpoint(folder, 10, metrics={"loss": 0.9}, token="00000002")
        folder.prune(keep, newest=10)
        put_checkpoint(folder, 20, metrics={"loss": 0.5})
        assert folder.prune(keep, newest=20) == [10]

    def test_what_cannot_be_read_stays_for_people_to_look_at(self, folder: Folder) -> None:
        for step in (10, 20, 30):
            put_checkpoint(folder, step)
        folder.storage.replace(f"{name_of(20)}/manifest.json", b"")
        assert folder.prune(Keep(last=2)) == []
        assert folder.prune(Keep(last=1)) == [10]
        assert steps(folder) == [20, 30]

    def test_the_good_one_stays_when_a_later_one_was_stepped_over(self, folder: Folder) -> None:
        for step in (10, 20, 30):
            put_checkpoint(folder, step, {"x": torch.ones(9)})
        damage(folder, 30)
        found = folder.newest_good()
        assert found is not None
        put_checkpoint(folder, 25, {"x": torch.ones(9)})
        assert folder.prune(Keep(last=2), newest=25) == [10]
        assert steps(folder) == [20, 25, 30]


def test_one_of_many_by_its_path(local: Folder) -> None:
    made = put_checkpoint(local, 10, {"x": torch.ones(2)})
    assert Checkpoint.at(made.path).step == 10
    assert repr(made) == f"Checkpoint({str(Path(local.where) / name_of(10))!r})"
