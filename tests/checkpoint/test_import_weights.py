"""Weights of other programs become a checkpoint; nothing in their files is executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.weights.export import export_hf, export_safetensors, export_torch
from paceline.checkpoint.weights.import_weights import import_weights
from paceline.errors import CheckpointError

ROWS = torch.zeros(2**17)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "body.weight": torch.randn(5, 3),
        "body.steps": torch.tensor(7),
        "body.mask": torch.tensor([True, False]),
        "head.weight": torch.randn(2, 5, dtype=torch.bfloat16),
        "head.nothing": torch.empty(0, 2),
    }


def holds(checkpoint: Checkpoint, expected: dict[str, Tensor]) -> bool:
    names = {f"model/{name}" for name in expected}
    found = {name: checkpoint.read_tensor(f"model/{name}") for name in expected}
    return (
        checkpoint.manifest.tensors.keys() == names
        and checkpoint.damages() == []
        and all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in expected.items())
    )


def test_a_safetensors_file_and_back(weights: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(weights, tmp_path / "in.safetensors")
    checkpoint = import_weights(tmp_path / "in.safetensors", tmp_path / "c")
    assert (checkpoint.step, checkpoint.manifest.info["reason"]) == (0, "import")
    assert holds(checkpoint, weights)
    again = export_safetensors(checkpoint, tmp_path / "out.safetensors")
    assert holds(import_weights(again, tmp_path / "again"), weights)


def test_a_torch_state_dict_and_back(weights: dict[str, Tensor], tmp_path: Path) -> None:
    weights["body.turned"] = weights["body.weight"].t()  # other strides, the same memory
    torch.save(OrderedDict(weights), tmp_path / "in.pt")
    checkpoint = import_weights(tmp_path / "in.pt", tmp_path / "c")
    assert holds(checkpoint, weights)
    again = export_torch(checkpoint, tmp_path / "out.pt")
    assert holds(import_weights(again, tmp_path / "again"), weights)


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
def test_a_state_dict_among_other_things(
    weights: dict[str, Tensor], tmp_path: Path, key: str
) -> None:
    torch.save({"epoch": 3, key: weights, "optimizer": {"state": {}}}, tmp_path / "in.pth")
    assert holds(import_weights(tmp_path / "in.pth", tmp_path / "c"), weights)


def test_a_file_of_torchs_older_format(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "in.pt", _use_new_zipfile_serialization=False)
    assert holds(import_weights(tmp_path / "in.pt", tmp_path / "c"), weights)


def test_a_checkpoint_of_paceline_0_1(weights: dict[str, Tensor], tmp_path: Path) -> None:
    old = {
        "format": 1,
        "layout": "dp=2",
        "engine": {"step": 40, "model": weights, "optimizer": {"state": {}, "param_groups": []}},
        "loader": {},
    }
    torch.save(old, tmp_path / "step-000000040.pt")
    checkpoint = import_weights(tmp_path / "step-000000040.pt", tmp_path / "c")
    assert holds(checkpoint, weights)
    assert checkpoint.manifest.info["source"].startswith("paceline-0.1: ")
    with pytest.raises(CheckpointError, match=r"by its name: .*step-000000040\.pt"):
        import_weights(tmp_path, tmp_path / "d")


@pytest.mark.parametrize("max_shard", [10_000_000, 3000], ids=["one file", "shards"])
def test_a_hugging_face_folder_and_back(tmp_path: Path, max_shard: int) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=32, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "in", max_shard_size=max_shard)
    checkpoint = import_weights(tmp_path / "in", tmp_path / "c")
    # transformers leaves the tied head out of its files.
    assert holds(checkpoint, {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"})
    loaded = AutoModelForCausalLM.from_pretrained(export_hf(checkpoint, tmp_path / "out"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_a_hugging_face_folder_of_torch_files(weights: dict[str, Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    torch.save(weights, folder / "pytorch_model.bin")
    assert holds(import_weights(folder, tmp_path / "c"), weights)
    (folder / "pytorch_model.bin").rename(folder / "first.bin")
    index = {"weight_map": dict.fromkeys(weights, "first.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert holds(import_weights(folder, tmp_path / "d"), weights)


def test_prefixes_come_and_go(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({f"module.{n}": t for n, t in weights.items()}, tmp_path / "in.pt")
    checkpoint = import_weights(tmp_path / "in.pt", tmp_path / "c", strip="module.", part="net")
    assert holds(checkpoint, {f"net.{n}": t for n, t in weights.items()})
    with pytest.raises(CheckpointError, match=r"5 of 5 names do not begin with 'm\.'"):
        import_weights(tmp_path / "in.pt", tmp_path / "d", strip="m.")


# ------------------------------------------------------------------ refused


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zip", "older torch", "plain pickle"])
def test_code_in_a_pickle_is_named_and_not_run(tmp_path: Path, kind: str) -> None:
    marker, file = tmp_path / "executed", tmp_path / "in.pt"
    content = {"w": torch.ones(2), "evil": Harmful(marker)}
    if kind == "plain pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(CheckpointError, match=r"needs .*posix\.mkdir.* would execute code"):
        import_weights(file, tmp_path / "c")
    assert not marker.exists()
    assert sorted(os.listdir(tmp_path)) == ["in.pt"]


def test_a_whole_pickled_model_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=r"needs torch\.nn\.modules\.linear\.Linear"):
        import_weights(tmp_path / "in.pt", tmp_path / "c")


def test_target_that_holds_checkpoints_is_left_alone(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(weights, tmp_path / "in.safetensors")
    import_weights(tmp_path / "in.safetensors", tmp_path / "c")
    with pytest.raises(CheckpointError, match="holds step-000000000 already"):
        import_weights(tmp_path / "in.safetensors", tmp_path / "c")
    with pytest.raises(CheckpointError, match="a checkpoint of Paceline's already"):
        import_weights(tmp_path / "c", tmp_path / "d")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.pt", None, "does not exist"),
        ("in.txt", b"hello", "is neither of what can be imported"),
        ("in.pt", b"", "cannot be read by torch.load"),
        ("in.pt", b"PK\x03\x04 not a zip", "cannot be read by torch.load"),
        ("in.safetensors", b"", "cannot be read as a safetensors file"),
        ("in.safetensors", b"\xff" * 64, "cannot be read as a safetensors file"),
    ],
)
def test_files_that_are_no_weights(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        import_weights(tmp_path / name, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list, not a state dict"),
        ({"a": 1}, "holds no state dict"),
        ({"model": {}, "state_dict": {}}, "holds no state dict"),
        ({"w": torch.ones(1), "n": 3}, "'n' is a int, and weights are tensors"),
        ({"w": torch.ones(2, 2).to_sparse()}, "'w' is a sparse_coo tensor"),
    ],
    ids=["list", "numbers", "two", "mixed", "sparse"],
)
def test_torch_files_that_hold_something_else(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=message):
        import_weights(tmp_path / "in.pt", tmp_path / "c")


def test_truncated_files(weights: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(weights, tmp_path / "in.safetensors")
    torch.save(weights, tmp_path / "in.pt")
    for name in ("in.safetensors", "in.pt"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-20])
        with pytest.raises(CheckpointError, match="cannot be read"):
            import_weights(tmp_path / name, tmp_path / "c")


def test_wrong_hugging_face_folders(weights: dict[str, Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"

    def refused(weight_map: Any, message: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            import_weights(folder, tmp_path / "c")

    with pytest.raises(CheckpointError, match="it is no Hugging Face folder"):
        import_weights(folder, tmp_path / "c")
    save_file(weights, folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", tmp_path / "b.safetensors")
    everything = dict.fromkeys(weights, "a.safetensors")
    refused([], "has no 'weight_map'")
    refused({**everything, "x": "../b.safetensors"}, "outside of its folder")
    refused({**everything, "x": "c.safetensors"}, r"c\.safetensors cannot be read")
    refused({**everything, "x": "a.safetensors"}, r"a\.safetensors lacks 'x'")
    refused({"head.weight": "a.safetensors"}, "holds, against its index, 'body")
    index.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_weights(folder, tmp_path / "c")


# ------------------------------------------------------------------ odd zip files


def repacked(source: Path, target: Path, compressed: str = "", **changes: Any) -> Path:
    """The same entries, those whose names match deflated."""
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(target, "w") as made:
        for entry in given.infolist():
            kind = zipfile.ZIP_DEFLATED if re.search(compressed, entry.filename) else 0
            made.writestr(entry.filename, given.read(entry), kind)
            if changes.get("twice") and entry.filename.endswith("data/0"):
                name = entry.filename if changes["twice"] == "same" else entry.filename.upper()
                with warnings.catch_warnings(action="ignore"):
                    made.writestr(name, b"\x01" * entry.file_size)
    return target


@pytest.fixture
def packed(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    torch.save(weights, tmp_path / "in.pt")
    return tmp_path / "in.pt"


@pytest.mark.parametrize("compressed", ["", r"data/1$", r"data\.pkl$"], ids=["all", "one", "text"])
def test_a_compressed_file_gives_the_tensors_it_holds(
    weights: dict[str, Tensor],
    packed: Path,
    tmp_path: Path,
    compressed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = repacked(packed, tmp_path / "small.pt", compressed)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert holds(import_weights(source, tmp_path / "c"), weights)
    assert list(temporary.iterdir()) == []


def test_a_zip_written_as_a_stream(
    weights: dict[str, Tensor], packed: Path, tmp_path: Path
) -> None:
    """Sizes and sums come behind each entry there (data descriptors), in 64 bits."""

    class Stream(io.RawIOBase):
        def __init__(self) -> None:
            self.written = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.written += data
            return len(data)

    stream = Stream()
    with zipfile.ZipFile(packed) as given, zipfile.ZipFile(stream, "w") as made:  # type: ignore[type-var]
        for entry in given.infolist():
            with made.open(zipfile.ZipInfo(entry.filename), "w", force_zip64=True) as into:
                into.write(given.read(entry))
    (tmp_path / "stream.pt").write_bytes(stream.written)
    assert holds(import_weights(tmp_path / "stream.pt", tmp_path / "c"), weights)


def test_a_file_without_checksums(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "in.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert holds(import_weights(tmp_path / "in.pt", tmp_path / "c"), weights)


def encrypted(data: bytes) -> bytes:
    """With the flag set that says so, in the list of entries."""
    at = data.index(b"PK\x01\x02") + 8
    return data[:at] + bytes([data[at] | 1]) + data[at + 1 :]


def flipped(data: bytes) -> bytes:
    """With one bit of the first weights changed."""
    at = data.index(torch.load(io.BytesIO(data))["body.weight"].numpy().tobytes())
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data + b"garbage", "begins like a zip file and does not end like one"),
        (lambda data: data[:-2] + b"\x07\x00garbage", "does not end like one"),
        # Python 3.12 and later refuse it themselves.
        (lambda data: data + data, "has something before its archive|BadZipFile"),
        (encrypted, r"is encrypted"),
        (flipped, r"is damaged .*CRC"),
    ],
    ids=["garbage", "comment", "two archives", "encrypted", "flipped bit"],
)
def test_zip_files_that_might_be_misread(
    packed: Path, tmp_path: Path, change: Any, message: str
) -> None:
    packed.write_bytes(change(packed.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        import_weights(packed, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("twice", ["same", "upper case"])
def test_an_entry_that_is_there_twice(packed: Path, tmp_path: Path, twice: str) -> None:
    source = repacked(packed, tmp_path / "twice.pt", "nothing", twice=twice)
    with pytest.raises(CheckpointError, match=r"holds '.*' twice: which one counts"):
        import_weights(source, tmp_path / "c")


def test_a_compressed_file_larger_than_the_disk(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = repacked(packed, tmp_path / "small.pt")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 4, 5))
    with pytest.raises(CheckpointError, match=r"takes \d+ bytes unpacked: 5 are free in .*TMPDIR"):
        import_weights(source, tmp_path / "c")


# ------------------------------------------------------------------ odd tensors and names


def test_every_kind_of_plain_tensor(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    kinds = {
        "strided": base[::2, 1::2],
        "turned": base.t(),
        "windows": base.as_strided((3, 4), (2, 1)),  # they overlap
        "tied": base,
        "tied again": base,
        "expanded": torch.tensor([3.0]).expand(5, 2),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "complex": torch.randn(2, dtype=torch.complex128),
        "float8": torch.randn(4).to(torch.float8_e4m3fn).view(2, 2),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 10**12),
        "small": torch.tensor([1, 2], dtype=torch.uint16),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    torch.save(kinds, tmp_path / "in.pt")
    checkpoint = import_weights(tmp_path / "in.pt", tmp_path / "c")
    for name, tensor in kinds.items():
        found = checkpoint.read_tensor(f"model/{name}")
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.tolist() == tensor.tolist() if tensor.numel() else not found.numel()


def odd(kind: str) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # of kinds that torch is not sure of
        if kind == "csr":
            return torch.ones(2, 2).to_sparse_csr()
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({1: torch.ones(1), "1": torch.zeros(1)}, r"the key 1 of a tensor is a int"),
        ({("a", "b"): torch.ones(1)}, r"the key \('a', 'b'\) of a tensor is a tuple"),
        ({b"w": torch.ones(1)}, "is a bytes"),
        ({None: torch.ones(1)}, "is a NoneType"),
        ({"": torch.ones(1)}, "has no name"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "'a' is a dict"),
        ({"w": torch.zeros(1).expand(16384, 16384)}, r"'w' of shape .* the file holds 4 for it"),
        ({"b": torch.zeros(2**20), "w": torch.zeros(2**21)[:1].expand(2**19)}, "an expanded"),
        ({"w": torch.zeros(2**19).as_strided((2**18, 2**18), (1, 1))}, "an expanded"),
        ({str(n): ROWS for n in range(600)}, r"600 tensors that would take \d+ bytes"),
        ({"model": {}}, "holds no tensors"),
        ({}, "holds no state dict"),
        ({"w": odd("csr")}, "'w' is a sparse_csr tensor"),
        ({"w": odd("quantized")}, "'w' is a quantized tensor"),
        ({"w": torch.ones(2, device="meta")}, "'w' is a meta tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_and_names_that_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.save(content, tmp_path / "in.pt")
        with pytest.raises(CheckpointError, match=message):
            import_weights(tmp_path / "in.pt", tmp_path / "c")
    assert os.listdir(tmp_path) == ["in.pt"]


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_safetensors_file_without_tensors(tmp_path: Path, metadata: Any) -> None:
    save_file({}, tmp_path / "in.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match="holds no tensors: there is nothing to import"):
        import_weights(tmp_path / "in.safetensors", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("in.pt", "in.safetensors", "odd", "in/model.safetensors"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError, match="it is no regular file"):
            import_weights((tmp_path / name), tmp_path / "c")
    with pytest.raises(CheckpointError, match="it is no regular file"):
        import_weights(folder, tmp_path / "c")
    with pytest.raises(CheckpointError, match="it is no regular file"):
        import_weights("/dev/zero", tmp_path / "c")


def test_shards_that_do_not_fit_their_index(weights: dict[str, Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    first = "model-00001-of-00002.safetensors"
    save_file(weights, folder / first)

    def refused(text: str, message: str) -> None:
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            import_weights(folder, tmp_path / "c")

    good = json.dumps({"weight_map": dict.fromkeys(weights, first)})
    refused('{"weight_map": {}}', f"does not name {first}")
    for outside in ("..", ".", "", "/etc/passwd", "a/../b", "..\\\\b", "a\\u0000"):
        refused(f'{{"weight_map": {{"w": "{outside}"}}}}', "outside of its folder")
    twin = '{"weight_map": {"w": "a", "w": "b"}}'
    refused(twin, "names 'w' twice")
    save_file(weights, folder / "model-00002-of-00002.safetensors")
    refused(good, "does not name model-00002-of-00002")
    (folder / "model-00002-of-00002.safetensors").rename(folder / "model.safetensors")
    refused(good, "which of them counts")
    (folder / "model.safetensors").unlink()
    assert holds(import_weights(folder, tmp_path / "c"), weights)
    (folder / first).unlink()
    index.write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="holds no tensors"):
        import_weights(folder, tmp_path / "d")


def test_a_target_that_was_there_stays_as_it_was(tmp_path: Path, packed: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").write_text("mine")
    torch.save({1: torch.ones(1)}, packed)
    with pytest.raises(CheckpointError):
        import_weights(packed, tmp_path / "c")
    assert os.listdir(tmp_path / "c") == ["mine"]


def test_a_failed_write_leaves_no_folder(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.checkpoint.storage.local.os.fsync", full)
    with pytest.raises(CheckpointError, match=r"[Nn]o space left"):
        import_weights(packed, tmp_path / "new" / "c")
    monkeypatch.undo()
    assert not (tmp_path / "new").exists()
