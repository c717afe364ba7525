"""Manifests whose hash is right and whose content is anything: refused, by file and field."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from checkpoint.plain_checkpoints import put_checkpoint
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.hashing import BLOCK
from paceline.checkpoint.listing import list_checkpoints
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.manifest_fields import MOST_BLOCK, MOST_BYTES
from paceline.errors import CheckpointDamaged, CheckpointError, StorageError

FILE = "rank-00000-0a1b2c3d.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "checkpoints")
    folder.storage.make_folder()
    put_checkpoint(folder, 7, {"x": torch.ones(8)}, {"loop": {"a": 1}}, ranks=1)
    return folder


def content_of(folder: Folder) -> Any:
    path = folder.storage.root / "step-000000007" / "manifest.json"
    return json.loads(path.read_bytes().partition(b"\n")[2])


def put(folder: Folder, content: Any) -> Checkpoint:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = {"paceline_checkpoint": 2, "bytes": len(body)}
    head["xxh3_128"] = xxhash.xxh3_128_hexdigest(body)
    path = folder.storage.root / "step-000000007" / "manifest.json"
    path.write_bytes(json.dumps(head).encode() + b"\n" + body + b"\n")
    return folder.get(7)


def changed(content: Any, path: list[Any], value: Any) -> Any:
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["step"], "7", "step must be a whole number"),
        (["step"], True, "step must be a whole number"),
        (["step"], 10**30, "not a number beyond all bounds"),
        (["info"], [], "info must be an object"),
        (["info", "metrics"], [1], "info, metrics must be an object"),
        (["info", "metrics"], {"a": 10**400}, "too large"),
        (["files"], [], "files must be an object"),
        (["files", FILE], 5, f"file '{FILE}' must be an array of 3"),
        (["files", FILE, 0], -1, "size must be a whole number"),
        (["files", FILE, 0], None, "size must be a whole number"),
        (["files", FILE, 1], MOST_BLOCK + 1, f"block must be a whole number from 0 to {MOST_BLOCK}"),
        (["files", FILE, 2], "abc", "hashes must be an array"),
        (["files", FILE, 2, 0], 5, "hashes must be texts"),
        (["tensors"], None, "tensors must be an object"),
        (["tensors", "x"], [[8], "float32"], "tensor 'x' must be an array of 3"),
        (["tensors", "x", 0], 8, "tensor 'x', shape must be an array"),
        (["tensors", "x", 0], [1.5], "tensor 'x', shape must be a whole number"),
        (["tensors", "x", 0], [1] * 100, "100 dimensions"),
        (["tensors", "x", 0], [2**40, 2**40], "more elements than can be counted"),
        (["tensors", "x", 1], 5, "dtype must be a text"),
        (["tensors", "x", 2, 0], [[0], [8]], "tensor 'x', box must be an array of 5"),
        (["tensors", "x", 2, 0, 0], [4], "not inside of its shape"),
        (["tensors", "x", 2, 0, 1], [8, 1], "not inside of its shape"),
        (["tensors", "x", 2, 0, 2], 3, "file must be a text"),
        (["objects", "loop"], {}, "object 'loop' must be an array of 3"),
        (["objects", "loop", 1], "0", "start must be a whole number"),
    ],
)  # fmt: skip
def test_every_field_is_checked_and_named(
    folder: Folder, path: list[Any], value: Any, says: str
) -> None:
    checkpoint = put(folder, changed(content_of(folder), path, value))
    with pytest.raises(CheckpointDamaged) as raised:
        checkpoint.manifest  # noqa: B018
    assert says in str(raised.value)
    assert "step-000000007/manifest.json" in str(raised.value)


@pytest.mark.parametrize("key", ["step", "info", "files", "tensors", "objects"])
def test_every_field_must_be_there(folder: Folder, key: str) -> None:
    content = content_of(folder)
    del content[key]
    with pytest.raises(CheckpointDamaged, match=f"no field '{key}'"):
        put(folder, content).manifest  # noqa: B018


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * 50_000, "nested too deeply"),
        (b'{"step": 7, "step": 8}', "'step' is given twice"),
        (b"5", "must hold an object"),
        (b'{"step": ' + b"9" * 5000 + b"}", "integer string conversion"),
        (b"\xff\xfe", "is damaged"),
        (b'{"step":7,"info":{"a":' + b"[" * 300 + b"]" * 300 + b"}}", "has no field"),
    ],
)
def test_bodies_that_are_none(folder: Folder, body: bytes, says: str) -> None:
    with pytest.raises(CheckpointDamaged, match=says):
        put(folder, body).manifest  # noqa: B018
    (listed,) = list_checkpoints(folder.where)
    assert listed.state == "damaged"


def test_a_first_line_that_no_hash_can_match(folder: Folder) -> None:
    path = folder.storage.root / "step-000000007" / "manifest.json"
    path.write_bytes(b'{"paceline_checkpoint": 2, "bytes": 2, "xxh3_128": "\\ud800"}\n{}\n')
    with pytest.raises(CheckpointDamaged):
        folder.get(7).manifest  # noqa: B018
    (listed,) = list_checkpoints(folder.where)
    assert listed.state == "damaged"


def test_info_is_not_nested_without_end(folder: Folder) -> None:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    content = changed(content_of(folder), ["info", "deep"], deep)
    with pytest.raises(CheckpointDamaged, match="info is nested more than 32 deep"):
        put(folder, content).manifest  # noqa: B018


def test_a_sparse_manifest_is_not_read(folder: Folder) -> None:
    with open(folder.storage.root / "step-000000007" / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointDamaged, match=f"at most {MOST_BYTES}"):
        folder.get(7).manifest  # noqa: B018
    (listed,) = list_checkpoints(folder.where)
    assert (listed.state, str(MOST_BYTES) in listed.problem) == ("damaged", True)


def test_a_manifest_that_could_not_be_read_again_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.checkpoint.manifest_fields.MOST_BYTES", 50)
    with pytest.raises(CheckpointError, match="more than 50 is refused on reading"):
        Manifest(1).to_bytes()


def test_no_memory_is_taken_for_elements_that_are_nowhere(folder: Folder) -> None:
    content = content_of(folder)
    content["tensors"]["x"] = [[2**50], "float32", []]
    with pytest.raises(CheckpointError, match=f"lacks {2**50} of the {2**50} elements"):
        put(folder, content).read_tensor("x")
    size = 2**50
    content["tensors"]["x"] = [[size], "uint8", [[[0], [size], "big", 0, size]]]
    content["files"]["big"] = [size, MOST_BLOCK, ["0" * 32] * (size // MOST_BLOCK)]
    content["files"]["big"][2] = content["files"]["big"][2][:1]
    content["files"]["big"][:2] = [BLOCK, BLOCK]
    with pytest.raises(CheckpointDamaged, match="beyond the end"):
        put(folder, content).read_tensor("x")


def test_an_object_whose_parts_are_compressed_is_not_unpacked(folder: Folder) -> None:
    import io
    import zipfile

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 1_000_000)
    from checkpoint.plain_checkpoints import put_file, put_manifest

    data = packed.getvalue()
    entry = put_file(folder.storage, "step-000000007/z.bin", [data])
    manifest = folder.get(7).manifest
    from paceline.checkpoint.manifest import ObjectEntry

    manifest.files["z.bin"] = entry
    manifest.objects["z"] = ObjectEntry("z.bin", 0, len(data))
    put_manifest(folder, 7, manifest)
    with pytest.raises(CheckpointError, match="cannot be loaded") as raised:
        folder.get(7).read_object("z")
    assert "compressed" in str(raised.value.__cause__)


def test_pipes_and_devices_in_place_of_files(folder: Folder) -> None:
    path = folder.storage.root / "step-000000007" / FILE
    path.unlink()
    os.mkfifo(path)
    assert folder.get(7).damages()
    with pytest.raises(StorageError, match="a pipe, not a file"):
        folder.storage.open_read(f"step-000000007/{FILE}")
    path.unlink()
    path.symlink_to("/dev/zero")
    assert folder.get(7).damages()
    with pytest.raises(CheckpointDamaged):
        folder.get(7).read_tensor("x")


def test_pruning_does_not_follow_links_out_of_the_folder(folder: Folder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    os.rename(folder.storage.root / "step-000000007", elsewhere)
    (folder.storage.root / "step-000000007").symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    with pytest.raises(StorageError, match="is a link to somewhere else"):
        folder.remove(folder.get(7))
    assert sorted(elsewhere.iterdir()) == before


def test_a_lock_is_not_written_where_a_link_leads(folder: Folder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("leave me alone")
    (folder.storage.root / ".lock").symlink_to(victim)
    with pytest.raises(StorageError, match="lock"):
        folder.lock("me")
    assert victim.read_text() == "leave me alone"
