"""Weights of other programs become a checkpoint; nothing in their files is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.weights.export import export_hf, export_safetensors, export_torch
from paceline.checkpoint.weights.importing import import_weights
from paceline.errors import CheckpointError


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
