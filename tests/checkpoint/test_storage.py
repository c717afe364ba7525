from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from storage_contract import MIB, StorageContract, views

from paceline.checkpoint.storage.local import LocalStorage
from paceline.checkpoint.storage.open import open_storage
from paceline.checkpoint.storage.storage import ScatteringFile, Storage
from paceline.errors import CheckpointError, MissingExtra, StorageError


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(tmp_path / "run")


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self, memory_url: str) -> Storage:
        return open_storage(memory_url)


class TestWhichStorage:
    @pytest.mark.parametrize(
        "where", ["plain/folder", "file:///some/folder", Path("c:d"), "/a:b/c"]
    )
    def test_local(self, where: str | Path) -> None:
        assert isinstance(open_storage(where), LocalStorage)

    def test_a_file_url_is_its_path(self) -> None:
        assert open_storage("file:///some/folder").where == "/some/folder"

    def test_a_path_does_not_move_with_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert open_storage("runs").where == str(tmp_path / "runs")

    def test_unknown_url(self) -> None:
        with pytest.raises(CheckpointError, match=r"cannot open nosuch://x/y: .*s3://"):
            open_storage("nosuch://x/y")

    def test_a_missing_package_is_named_with_the_command(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fsspec.registry import _registry

        monkeypatch.setitem(sys.modules, "s3fs", None)
        monkeypatch.delitem(_registry, "s3", raising=False)
        with pytest.raises(MissingExtra, match=r"pip install 'paceline\[s3\]'"):
            open_storage("s3://bucket/x")

    def test_local_folders_take_no_options(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"storage options key.*takes none"):
            open_storage(tmp_path, {"key": "x"})


class TestLocalFaults:
    """What the system refuses is told by name, and what was there stays as it was."""

    def test_full_disk(self, mount: Callable[[str], Path]) -> None:
        storage = LocalStorage(mount("2m"))
        storage.create("old", views(b"earlier"))
        with pytest.raises(StorageError) as caught:
            storage.create("x", views(*[bytes(MIB)] * 4))
        text = str(caught.value)
        assert f"cannot write {storage.where}/x: No space left on device." in text
        assert "Earlier checkpoints are untouched." in text
        assert "Free some space" in text
        assert storage.names() == ["old"]  # what was written of it is given back
        assert storage.read_bytes("old") == b"earlier"

    def test_full_disk_while_replacing(self, mount: Callable[[str], Path]) -> None:
        storage = LocalStorage(mount("1m"))
        storage.replace("manifest.json", b"earlier")
        with pytest.raises(StorageError, match="No space left"):
            storage.replace("manifest.json", bytes(2 * MIB))
        assert storage.read_bytes("manifest.json") == b"earlier"
        assert storage.names() == ["manifest.json"]

    def test_read_only(self, mount: Any) -> None:
        disk = mount("1m")
        storage = LocalStorage(disk)
        storage.create("old", views(b"earlier"))
        mount.again(disk, "ro")
        for attempt in (
            lambda: storage.create("x", views(b"1")),
            lambda: storage.replace("old", b"1"),
            lambda: storage.make_folder("a"),
            lambda: storage.delete("old"),
        ):
            with pytest.raises(
                StorageError, match=r"Read-only file system.*Make the file system w"
            ):
                attempt()
        assert storage.read_bytes("old") == b"earlier"

    def test_the_folder_vanishes_during_the_write(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.make_folder("step")

        def chunks() -> Iterator[memoryview]:
            yield memoryview(bytes(6 * MIB))
            shutil.rmtree(tmp_path / "step")
            yield memoryview(bytes(6 * MIB))

        with pytest.raises(StorageError, match=r"cannot write .*step/x: No such file.*mounted"):
            storage.create("step/x", chunks())

    def test_a_vanished_folder_is_not_made_again(self, tmp_path: Path) -> None:
        # A disk that is no longer mounted must not be replaced by a folder of the same name.
        storage = LocalStorage(tmp_path / "gone")
        for attempt in (lambda: storage.create("x", []), lambda: storage.replace("x", b"1")):
            with pytest.raises(StorageError, match="No such file or directory"):
                attempt()
        assert not (tmp_path / "gone").exists()

    def test_an_existing_file_is_not_written_over(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.create("x", views(b"first"))
        with pytest.raises(StorageError, match=r"File exists.*another process"):
            storage.create("x", views(b"second"))
        assert storage.read_bytes("x") == b"first"

    def test_a_file_where_a_folder_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("a file")
        storage = LocalStorage(tmp_path / "run")
        for attempt in (storage.names, storage.make_folder, lambda: storage.replace("x", b"")):
            with pytest.raises(StorageError, match=str(tmp_path / "run")):
                attempt()
        assert (tmp_path / "run").read_text() == "a file"

    def test_a_bad_sector_is_told_from_a_refusal(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = LocalStorage(tmp_path)
        storage.create("x", views(b"1234"))
        for number, unreadable in ((errno.EIO, True), (errno.ESTALE, False)):
            failing = OSError(number, os.strerror(number))
            monkeypatch.setattr(os, "preadv", _raising(failing))
            with pytest.raises(StorageError) as caught:
                storage.read_bytes("x")
            assert caught.value.unreadable is unreadable
            assert os.strerror(number) in str(caught.value)

    def test_reads_that_stop_short_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = LocalStorage(tmp_path)
        storage.create("x", views(b"0123456789"))
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, to, at: real(fd, [to[0][:3]], at))
        assert storage.read_bytes("x") == b"0123456789"

    def test_scattered_reads_that_stop_short_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = LocalStorage(tmp_path)
        content = bytes(range(40))
        storage.create("x", views(content))
        real = os.preadv
        for most in (1, 3, 7, 100):

            def short(handle: int, into: list[memoryview], at: int, most: int = most) -> int:
                room = bytearray(min(most, sum(map(len, into))))
                got = found = real(handle, [room], at)
                for view in into:
                    count = min(len(view), found)
                    view[:count] = room[got - found : got - found + count]
                    found -= count
                return got

            monkeypatch.setattr(os, "preadv", short)
            places = [memoryview(bytearray(size)) for size in (0, 5, 1, 0, 12, 3)]
            with storage.open_read("x") as file:
                assert isinstance(file, ScatteringFile)
                assert file.read_scattered(2, places) == 21
                assert b"".join(places) == content[2:23]
                assert file.read_scattered(30, places) == 10  # the file ends before
                assert b"".join(places)[:10] == content[30:]

    def test_it_is_on_the_disk_when_it_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []
        real = os.fsync

        def fsync(handle: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{handle}"))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        storage = LocalStorage(tmp_path)
        storage.make_folder("a/b")
        assert set(synced) == {str(tmp_path), str(tmp_path / "a")}  # the names of the new folders
        synced.clear()
        storage.create("a/x", views(b"1"))
        assert synced == [str(tmp_path / "a/x"), str(tmp_path / "a")]
        synced.clear()
        storage.replace("a/x", b"2")
        assert synced[0].endswith(".tmp")
        assert synced[1:] == [str(tmp_path / "a")]

    def test_a_reader_sees_all_of_the_old_or_all_of_the_new(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        old, new = b"a" * 300_000, b"b" * 500_000
        storage.replace("m", old)
        seen, ended = set(), threading.Event()

        def look() -> None:
            while not ended.is_set():
                seen.add(storage.read_bytes("m"))

        watcher = threading.Thread(target=look)
        watcher.start()
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            storage.replace("m", new)
            storage.replace("m", old)
        ended.set()
        watcher.join()
        assert seen <= {old, new}


def _raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call
