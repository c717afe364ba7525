"""Against a real S3 server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain_checkpoints import put_checkpoint
from storage_contract import StorageContract

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.storage.open import open_storage
from paceline.checkpoint.storage.remote import FsspecStorage
from paceline.checkpoint.storage.storage import Storage
from paceline.errors import CheckpointError, StorageError

MIB = 1024 * 1024


class TestS3Storage(StorageContract):
    @pytest.fixture
    def storage(self, s3_options: dict[str, Any], s3_url: str) -> Storage:
        return open_storage(s3_url, s3_options)


@pytest.fixture
def folder(s3_options: dict[str, Any], s3_url: str) -> Folder:
    return Folder(s3_url, s3_options)


def test_a_run_in_a_bucket(folder: Folder, s3_options: dict[str, Any]) -> None:
    tensors = {"w": torch.randn(7, 5), "b": torch.tensor(2.5, dtype=torch.bfloat16)}
    put_checkpoint(folder, 10, tensors, {"loop": {"epoch": 1}})
    newer = put_checkpoint(folder, 20, tensors)
    folder.storage.create("step-000000030/rank-00000-00.bin", [memoryview(b"unfinished")])
    assert [c.step for c in folder.checkpoints()] == [10, 20]
    assert folder.unfinished() == ["step-000000030"]

    file = next(iter(newer.manifest.files))
    data = bytearray(folder.storage.read_bytes(f"{newer.name}/{file}"))
    data[5] ^= 1
    folder.storage.replace(f"{newer.name}/{file}", bytes(data))
    told: list[str] = []
    good = folder.newest_good(lambda checkpoint, what: told.append(f"{checkpoint.step}: {what}"))
    assert good is not None
    assert good.step == 10
    assert len(told) == 1
    assert f"{file} is damaged: block at byte 0: expected" in told[0]

    again = Checkpoint.at(good.path, s3_options)
    assert all(torch.equal(again.read_tensor(name), tensors[name]) for name in tensors)
    assert again.read_object("loop") == {"epoch": 1}

    with folder.lock("the test"):
        assert folder.clean() == ["step-000000030"]
    folder.remove(newer)
    assert folder.storage.names() == ["step-000000010"]


def test_what_another_process_wrote_is_seen(folder: Folder, s3_options: dict[str, Any]) -> None:
    other = Folder(folder.where, s3_options)
    assert folder.checkpoints() == other.checkpoints() == []
    put_checkpoint(other, 10, {"w": torch.ones(3)})
    assert [c.step for c in folder.checkpoints()] == [10]
    other.remove(other.get(10))
    assert folder.checkpoints() == []


def test_an_upload_given_up_leaves_no_parts_to_pay_for(folder: Folder) -> None:
    storage = folder.storage
    assert isinstance(storage, FsspecStorage)

    def chunks() -> Iterator[memoryview]:
        yield memoryview(bytes(70 * MIB))  # more than a part, so that one is on the server
        raise KeyError("stop")

    with pytest.raises(KeyError):
        storage.create("x", chunks())
    assert storage.fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", []) == []
    assert storage.names() == []


def test_two_runs_in_one_bucket(folder: Folder, s3_options: dict[str, Any]) -> None:
    with (
        folder.lock("the first run", beat_s=0.2),
        pytest.raises(CheckpointError, match="in use by another run: the first run"),
    ):
        Folder(folder.where, s3_options).lock("the second run", beat_s=0.2)
    with Folder(folder.where, s3_options).lock("the second run", beat_s=0.2):
        pass
    assert folder.storage.names() == []


def test_a_bucket_that_is_not_there(s3_options: dict[str, Any]) -> None:
    folder = Folder("s3://no-such-bucket/run", s3_options)
    assert folder.checkpoints() == []
    with pytest.raises(StorageError, match=r"cannot write s3://no-such-bucket/run/x: .*bucket"):
        folder.storage.replace("x", b"1")


def test_a_server_that_is_down_is_no_damage(s3_options: dict[str, Any]) -> None:
    folder = Folder("s3://bucket/run", {**s3_options, "endpoint_url": "http://127.0.0.1:9"})
    for attempt in (folder.newest_good, lambda: folder.storage.replace("x", b"1")):
        with pytest.raises(StorageError, match=r"127.0.0.1:9.*credentials and the network"):
            attempt()
