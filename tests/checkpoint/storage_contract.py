"""What every kind of storage promises, as tests: local folders and object stores alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.checkpoint.storage.storage import Storage
from paceline.errors import StorageError

MIB = 1024 * 1024


def views(*chunks: bytes) -> list[memoryview]:
    return [memoryview(chunk) for chunk in chunks]


class StorageContract:
    """Tests that every kind of storage has to pass; a subclass brings the fixture ``storage``."""

    def test_what_is_created_is_read(self, storage: Storage) -> None:
        storage.make_folder("a")
        storage.create("a/x", views(b"abc", b"", b"defg"))
        storage.create("a/empty", [])
        assert storage.read_bytes("a/x") == b"abcdefg"
        assert storage.read_bytes("a/empty") == b""
        assert storage.names("a") == ["empty", "x"]
        assert storage.names() == ["a"]
        assert storage.sizes(["a/x", "a/empty", "a/no", "a"])[:3] == [7, 0, None]

    def test_a_range_is_read_where_it_belongs_and_stops_at_the_end(self, storage: Storage) -> None:
        storage.make_folder()
        storage.create("x", views(b"0123456789"))
        into = bytearray(b"....")
        with storage.open_read("x") as file:
            assert file.size == 10
            assert file.read_into(3, memoryview(into)) == 4
            assert into == b"3456"
            assert file.read_into(8, memoryview(into)) == 2
            assert into == b"8956"
            assert file.read_into(10, memoryview(into)) == 0
            assert file.read_into(0, memoryview(bytearray())) == 0

    def test_large_chunks_arrive_whole(self, storage: Storage) -> None:
        storage.make_folder()
        pattern = bytes(range(256)) * 4096  # 1 MiB
        storage.create("x", views(pattern * 6, b"tail", pattern, b"end"))
        assert storage.read_bytes("x") == pattern * 6 + b"tail" + pattern + b"end"

    def test_replacing(self, storage: Storage) -> None:
        storage.make_folder("a")
        storage.replace("a/m", b"old")
        storage.replace("a/m", b"newer")
        assert storage.read_bytes("a/m") == b"newer"
        assert storage.names("a") == ["m"]

    def test_moving(self, storage: Storage) -> None:
        storage.make_folder("a")
        storage.make_folder("b/c")
        storage.replace("a/m", b"one")
        storage.move("a/m", "b/c/n")
        assert storage.read_bytes("b/c/n") == b"one"
        assert storage.names("a") == []
        storage.replace("a/m", b"two")
        storage.move("a/m", "b/c/n")  # begun before, and not seen to have ended
        assert storage.read_bytes("b/c/n") == b"two"
        with pytest.raises(StorageError, match="a/gone"):
            storage.move("a/gone", "b/c/gone")

    def test_put_new_takes_a_name_once(self, storage: Storage) -> None:
        storage.make_folder()
        assert storage.put_new("l", b"first")
        assert not storage.put_new("l", b"second")
        assert storage.read_bytes("l") == b"first"

    def test_deleting(self, storage: Storage) -> None:
        storage.make_folder("a")
        storage.create("a/x", views(b"1"))
        storage.create("a/y", views(b"2"))
        storage.make_folder("ab")
        storage.create("ab/x", views(b"3"))
        storage.delete("a/x")
        storage.delete("a/x")
        assert storage.names("a") == ["y"]
        storage.delete_folder("a")
        storage.delete_folder("a")
        assert storage.names() == ["ab"]  # which only begins like it

    def test_nothing_there_is_no_error(self, storage: Storage) -> None:
        assert storage.names() == []
        assert storage.names("nowhere") == []
        assert storage.size("nowhere/x") is None

    def test_reading_what_is_not_there(self, storage: Storage) -> None:
        with pytest.raises(StorageError, match=r"cannot read .*nowhere/x"):
            storage.open_read("nowhere/x")

    def test_a_failing_source_leaves_nothing(self, storage: Storage) -> None:
        storage.make_folder()

        def chunks() -> Iterator[memoryview]:
            yield memoryview(bytes(6 * MIB))
            raise KeyError("the source failed")

        with pytest.raises(KeyError, match="the source failed"):
            storage.create("x", chunks())
        assert storage.names() == []
