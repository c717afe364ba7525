"""What shards hold: tar, JSON lines, Parquet and text, compressed and remote, and damaged."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from paceline.data import loader, shards
from paceline.errors import DataError

COUNTS = (3, 300, 1, 129)


def rows(shard: int) -> list[dict[str, Any]]:
    return [{"id": 1000 * shard + at, "text": f"línea {at}"} for at in range(COUNTS[shard])]


def write_jsonl(path: Path, shard: int) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(shard)]
    path.write_text("\n\n".join(lines) + "\n  \n", encoding="utf-8")


def write_gz(path: Path, shard: int) -> None:
    path.write_bytes(gzip.compress("\r\n".join(map(json.dumps, rows(shard))).encode()))


def write_parquet(path: Path, shard: int) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([{**row, "more": [1, row["id"]]} for row in rows(shard)])
    parquet.write_table(table, path, row_group_size=50)


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def write_tar(path: Path, shard: int) -> None:
    mode = "w:gz" if path.suffix == ".gz" else "w"
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for row in rows(shard):
            array = io.BytesIO()
            np.save(array, np.arange(3) + row["id"])
            name = f"a folder.d/{'long ' * 30}{row['id']:06d}"
            add(archive, f"{name}.json", json.dumps(row).encode())
            add(archive, f"{name}.cls", str(row["id"]).encode())
            add(archive, f"{name}.seg.npy", array.getvalue())
            add(archive, f"{name}.pkl", pickle.dumps(row))


@pytest.mark.parametrize(
    ("ending", "write"),
    [
        ("jsonl", write_jsonl),
        ("jsonl.gz", write_gz),
        ("parquet", write_parquet),
        ("tar", write_tar),
        ("tar.gz", write_tar),
    ],
)
def test_every_row_is_there_in_any_order(tmp_path: Path, ending: str, write: Any) -> None:
    for shard in range(len(COUNTS)):
        write(tmp_path / f"part-{shard}.{ending}", shard)
    wanted = [row for shard in range(len(COUNTS)) for row in rows(shard)]

    def row_of(sample: Any) -> Any:
        sample = sample.get("json", sample)
        return {name: sample[name] for name in ("id", "text")}

    for pattern in (f"{tmp_path}/*.{ending}", f"file://{tmp_path}/part-{{0..3}}.{ending}"):
        dataset = shards(pattern, index=tmp_path / "index", map=row_of, lanes=3)
        assert dataset.counts == list(COUNTS)
        assert [dataset[at] for at in (432, 5, 302, 300, 131, -433)] == [
            wanted[at] for at in (432, 5, 302, 300, 131, 0)
        ]
        data = loader(dataset, global_batch=50, collate_fn=list, rank=0, size=1)
        seen = [row for batch in data for row in batch]
        assert seen != wanted
        assert sorted(seen, key=lambda row: row["id"]) == wanted


def test_parts_of_a_sample_are_decoded_and_never_unpickled(tmp_path: Path) -> None:
    write_tar(tmp_path / "one.tar", 0)
    sample = shards(tmp_path / "one.tar")[2]
    assert sample["__key__"].endswith("long 000002")
    assert sample["cls"] == 2
    assert sample["seg.npy"].tolist() == [2, 3, 4]
    assert pickle.loads(sample["pkl"]) == rows(0)[2]
    assert isinstance(sample["pkl"], bytes)


def test_parquet_gives_arrays_and_the_columns_asked_for(tmp_path: Path) -> None:
    write_parquet(tmp_path / "one.parquet", 0)
    sample = shards(tmp_path / "one.parquet", columns=["more"])[1]
    assert list(sample) == ["more"]
    assert torch.as_tensor(sample["more"]).tolist() == [1, 1]
    with pytest.raises(DataError, match=r"has no column 'size'. It has: id, text, more"):
        shards(tmp_path / "one.parquet", columns=["size"])


def test_text_is_a_sample_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo words\n")
    dataset = shards(tmp_path / "a.txt")
    assert [dataset[at] for at in range(len(dataset))] == [{"text": "one"}, {"text": "two words"}]


def test_remote_files_are_read_through_a_copy() -> None:
    files = fsspec.filesystem("memory")
    for at in range(3):
        files.pipe(f"/shards/{at}.jsonl.gz", gzip.compress(f'{{"id": {at}}}\n'.encode() * 2))
    try:
        dataset = shards("memory://shards/*.jsonl.gz")
        assert [dataset[at]["id"] for at in range(6)] == [0, 0, 1, 1, 2, 2]
        with pytest.raises(DataError, match=r"cannot read the shard memory://shards/9.jsonl"):
            shards("memory://shards/9.jsonl")
    finally:
        files.rm("/shards", recursive=True)


def test_the_index_remembers_until_a_file_changes(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 0)
    index = tmp_path / "index.json"
    assert len(shards(tmp_path / "a.jsonl", index=index)) == 3
    saved = json.loads(index.read_text())
    saved["shards"][0]["count"] = 2
    index.write_text(json.dumps(saved))
    assert len(shards(tmp_path / "a.jsonl", index=index)) == 2
    write_jsonl(tmp_path / "a.jsonl", 1)
    assert len(shards(tmp_path / "a.jsonl", index=index)) == 300
    index.write_text('{"version": 1, "format": "jsonl", "block": 128, "shards": [{}]}')
    with pytest.raises(DataError, match=r"index.json is no index of shards"):
        shards(tmp_path / "a.jsonl", index=index)


def test_damaged_shards_name_file_and_record(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"bad.jsonl, record 1: Expecting value.*b'\{\"a\": '"):
        shards(tmp_path / "bad.jsonl")[1]
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(DataError, match=r"deep.jsonl, record 0"):
        shards(tmp_path / "deep.jsonl")[0]
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        add(archive, "1.json", b"{")
        array = io.BytesIO()
        np.save(array, np.array([object()], dtype=object), allow_pickle=True)
        add(archive, "2.npy", array.getvalue())
    bad = shards(tmp_path / "bad.tar")
    with pytest.raises(DataError, match=r"bad.tar, record 0, 1.json"):
        bad[0]
    with pytest.raises(DataError, match=r"bad.tar, record 1, 2.npy: .*allow_pickle=False"):
        bad[1]
    whole = (tmp_path / "bad.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:1600])
    with pytest.raises(DataError, match=r"cut.tar.*cut short"):
        shards(tmp_path / "cut.tar")
    (tmp_path / "no.tar").write_bytes(b"no tar file at all" * 100)
    with pytest.raises(DataError, match=r"no.tar is no tar file"):
        shards(tmp_path / "no.tar")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 99)[:-9])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: EOFError"):
        shards(tmp_path / "cut.jsonl.gz")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"no.parquet is no Parquet file"):
        shards(tmp_path / "no.parquet")
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        link = tarfile.TarInfo("1.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"link.tar, member '1.json': it is no plain file"):
        shards(tmp_path / "link.tar")


@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        ([], {}, "no file was given"),
        ("nowhere/*.tar", {}, "no file matches 'nowhere/\\*.tar'"),
        ("a.jsonl", {}, "cannot read the shard a.jsonl: No such file"),
        (["a.tar", "b.jsonl"], {}, "do not tell one format"),
        (["a.tar", "a.tar"], {}, "a.tar is given 2 times"),
        ("a.xyz", {"read": "arrow"}, "read='arrow' must be one of 'jsonl'"),
        ("a.xyz", {"read": "nowhere.at:all"}, "cannot import 'nowhere.at:all'"),
        ("a-{3..1}.tar", {}, "counts down"),
        ([3], {}, "3 is a int, but a file is named by a path"),
        ([3], {"read": range, "lanes": 0}, "lanes=0 must be a whole number, 1 or more"),
        ([0, 0], {"read": range}, "none of the 2 shards has a sample"),
        ([1], {"read": lambda shard: shard}, "gave a int: it must give the samples"),
        ([1], {"read": range, "counts": [1, 2]}, "2 counts for 1 shards"),
        ([1], {"read": range, "columns": ["a"]}, "columns=\\['a'\\] is for Parquet"),
    ],
)
def test_what_is_wrong_is_said(files: Any, options: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        shards(files, **options)
