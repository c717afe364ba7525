"""Digests: what finds damage, what finds tampering, and that nobody gets around a key."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from checkpoint.memory_cases import find_in_memory
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.hashing import (
    BlockHasher,
    Digest,
    hash_blocks,
    make_digest,
    read_key,
    with_key,
)
from paceline.checkpoint.listing import list_checkpoints
from paceline.checkpoint.locate import find_checkpoint
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.memory.segment_files import folder_of, segments
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.checkpoint.rank_state import RankState, whole_part
from paceline.checkpoint.sharded.save_load import load, save
from paceline.checkpoint.weights.export import export_safetensors
from paceline.checkpoint.weights.import_weights import import_weights
from paceline.errors import CheckpointDamaged, CheckpointError, ConfigError, KeyNeeded

KEY, OTHER = "env:PACELINE_TEST_KEY", "env:PACELINE_TEST_OTHER"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_KEY", "k" * 20)
    monkeypatch.setenv("PACELINE_TEST_OTHER", "o" * 80)


def put(where: Path, digest: Digest, step: int = 1) -> Checkpoint:
    state = RankState({"model/w": whole_part(torch.arange(6.0))}, {"engine": {"step": step}})
    return save(Folder(where, digest=digest), step, state, info={}, group=None)


def value(checkpoint: Checkpoint) -> list[float]:
    found = torch.zeros(6)
    load(checkpoint, {"model/w": whole_part(found)}, None)
    assert torch.equal(checkpoint.read_tensor("model/w"), found)
    return found.tolist()


def forged(checkpoint: Checkpoint, digest: Digest, number: float) -> None:
    """What an attacker does: other weights, and every hash computed anew."""
    (file,) = checkpoint.manifest.files
    folder = Path(checkpoint.path)
    data = bytearray((folder / file).read_bytes())
    start = checkpoint.manifest.tensors["model/w"].stored[0].start
    data[start : start + 4] = torch.tensor([number]).numpy().tobytes()
    (folder / file).write_bytes(data)
    hasher = BlockHasher(digest=digest)
    hasher.update(data)
    manifest = checkpoint.manifest
    manifest.files[file] = hasher.digests()
    (folder / "manifest.json").write_bytes(manifest.to_bytes(digest))


@pytest.mark.parametrize("digest", [make_digest(), make_digest("blake2b")], ids=["xxh3", "blake2b"])
def test_without_a_key_what_is_named_is_used(tmp_path: Path, digest: Digest) -> None:
    put(tmp_path, digest)
    found = find_checkpoint(tmp_path)
    assert (found.manifest.digest, found.damages()) == (digest.name, [])
    assert value(found) == [0, 1, 2, 3, 4, 5]
    head = json.loads((Path(found.path) / "manifest.json").read_bytes().partition(b"\n")[0])
    assert len(head[digest.name]) == {"xxh3_128": 32, "blake2b": 64}[digest.name]
    (file,) = found.manifest.files
    path = Path(found.path) / file
    *start, last = path.read_bytes()
    path.write_bytes(bytes([*start, last ^ 1]))
    assert len(find_checkpoint(tmp_path).damages()) == 1


def test_a_forged_checkpoint_passes_without_a_key_and_not_with_one(tmp_path: Path) -> None:
    plain = put(tmp_path / "plain", make_digest())
    forged(plain, make_digest(), 666.0)
    assert value(find_checkpoint(tmp_path / "plain"))[0] == 666.0  # why there are keys
    keyed = put(tmp_path / "keyed", make_digest("blake2b", KEY))
    assert value(find_checkpoint(tmp_path / "keyed", key=KEY))[0] == 0.0
    for attempt in (make_digest(), make_digest("blake2b"), make_digest("blake2b", OTHER)):
        forged(keyed, attempt, 666.0)
        found = find_checkpoint(tmp_path / "keyed", key=KEY)
        with pytest.raises(CheckpointDamaged, match=r"without a key|with another key"):
            value(found)
        assert len(found.damages()) == 1


def test_a_manifest_with_a_key_cannot_be_edited(tmp_path: Path) -> None:
    keyed = put(tmp_path, make_digest("blake2b", KEY))
    path = Path(keyed.path) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"float32"', b'"float16"'))
    with pytest.raises(CheckpointDamaged, match="expected hash"):
        _ = find_checkpoint(tmp_path, key=KEY).manifest
    # The hash of a block is not that of a manifest, whatever a block may be made to hold.
    digest = make_digest("blake2b", KEY)
    assert digest.of(b"{}") != digest.of_manifest(b"{}")


def test_a_key_is_asked_for_and_told_from_another(tmp_path: Path) -> None:
    put(tmp_path, make_digest("blake2b", KEY))
    with pytest.raises(KeyNeeded, match=r"written with a key.* --key on a command"):
        _ = find_checkpoint(tmp_path).manifest
    with pytest.raises(CheckpointDamaged, match="written with another key"):
        _ = find_checkpoint(tmp_path, key=OTHER).manifest
    assert [one.state for one in list_checkpoints(tmp_path, key=KEY)] == ["whole"]
    with pytest.raises(KeyNeeded):
        find_checkpoint(tmp_path).damages()
    assert [one.state for one in list_checkpoints(tmp_path)] == ["keyed"]
    assert "written with a key" in list_checkpoints(tmp_path)[0].problem


def test_a_folder_with_a_key_steps_over_what_has_none(tmp_path: Path) -> None:
    put(tmp_path, make_digest("blake2b", KEY), step=1)
    put(tmp_path, make_digest(), step=2)  # planted: newer, and without the key
    said: list[str] = []
    folder = Folder(tmp_path, digest=with_key(KEY))
    found = folder.newest_good(lambda _, why: said.append(why))
    assert found is not None
    assert found.step == 1
    assert "written without a key, and a key is required" in said[0]


def test_import_and_export_with_a_key(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    import_weights(tmp_path / "in.pt", tmp_path / "c", key=KEY)
    with pytest.raises(CheckpointError, match="written with a key"):
        export_safetensors(find_checkpoint(tmp_path / "c"), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    export_safetensors(find_checkpoint(tmp_path / "c", key=KEY), tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("key", [None, KEY])
def test_snapshots_in_memory_are_hashed_alike(tmp_path: Path, key: str | None) -> None:
    digest = make_digest("blake2b", key)
    tier = MemorySnapshots("run", None, after=None, root=tmp_path, digest=digest)
    state = RankState({"w": whole_part(torch.arange(4.0))}, {"object": 5})
    tier.snapshot(3, state)
    tier.wait()
    assert segments(tmp_path, digest)[0].steps == (3,)
    found = find_in_memory("run", None, root=tmp_path, digest=digest)
    assert found is not None
    into = torch.zeros(4)
    found.load({"w": whole_part(into)})
    assert (into.tolist(), found.read_object("object")) == ([0, 1, 2, 3], 5)
    found.close()
    problems: list[str] = []
    other = with_key(OTHER)
    again = find_in_memory("run", None, root=tmp_path, digest=other, on_problem=problems.append)
    assert again is None
    assert "another key" in problems[0] or "without a key" in problems[0]
    index = next(folder_of("run", tmp_path).glob("*.index"))
    index.write_bytes(Manifest(0).to_bytes())
    assert find_in_memory("run", None, root=tmp_path, digest=digest) is None
    tier.free()


# ------------------------------------------------------------------ keys


def test_keys_come_from_where_they_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"k" * 20 + b"\n")
    file.chmod(0o600)
    assert read_key(f"file:{file}") == read_key(KEY)
    assert len(read_key(OTHER)) == 64  # of any length: longer than BLAKE2b takes
    assert make_digest("blake2b", KEY) == with_key(KEY)
    assert "kkkk" not in repr(with_key(KEY))
    assert with_key(KEY).key_id != with_key(OTHER).key_id


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("my-own-secret", "must not stand here; write env:NAME"),
        ("env:", "followed by the name of a variable"),
        ("file:relative", "followed by an absolute path"),
        (7, "named by where it is kept"),
        ("env:PACELINE_TEST_NONE", "PACELINE_TEST_NONE is not set"),
        ("env:PACELINE_TEST_SHORT", "holds 3 bytes; a key takes at least 16"),
        ("file:/not/there", "cannot be read: No such file"),
        ("file:OPEN", "chmod 600"),
        ("file:FIFO", "name a file"),
    ],
)
def test_keys_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    monkeypatch.setenv("PACELINE_TEST_SHORT", "abc")
    (tmp_path / "open").write_bytes(b"k" * 20)
    (tmp_path / "open").chmod(0o644)
    os.mkfifo(tmp_path / "fifo", 0o600)
    if isinstance(reference, str):
        reference = reference.replace("OPEN", f"{tmp_path}/open")
        reference = reference.replace("FIFO", f"{tmp_path}/fifo")
    with pytest.raises(ConfigError, match=message) as said:
        read_key(reference)
    assert "my-own-secret" not in str(said.value)


def test_a_key_needs_a_digest_that_takes_one() -> None:
    with pytest.raises(ConfigError, match="xxh3 takes no key"):
        make_digest("xxh3", KEY)
    with pytest.raises(ConfigError, match="one of xxh3, blake2b"):
        make_digest("md5")


def test_a_key_does_not_travel_with_what_ranks_tell_each_other(tmp_path: Path) -> None:
    tier = MemorySnapshots("run", None, after=None, root=tmp_path, digest=with_key(KEY))
    tier.snapshot(3, RankState({"w": whole_part(torch.ones(2))}))
    tier.wait()
    from paceline.checkpoint.memory.segment_files import headers_in

    headers, _ = headers_in(folder_of("run", tmp_path), "", with_key(KEY))
    assert with_key(KEY).key not in pickle.dumps(headers)
    tier.free()


def test_blocks_hash_alike_in_pieces_and_at_once() -> None:
    digest = make_digest("blake2b", KEY)
    hasher = BlockHasher(4, digest)
    hasher.update(b"Pace")
    hasher.update(b"line")
    assert hasher.digests().hashes == hash_blocks(b"Paceline", 4, digest)
    assert hasher.digests().hashes != hash_blocks(b"Paceline", 4, make_digest("blake2b"))
