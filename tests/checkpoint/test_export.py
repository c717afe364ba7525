"""Weights that leave a checkpoint load in other programs, and nothing half-written stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import RankState, whole_part
from paceline.checkpoint.sharded.save_load import save
from paceline.checkpoint.weights.export import (
    export_hf,
    export_safetensors,
    export_torch,
    export_weights,
)
from paceline.errors import CheckpointError


class Tied(nn.Module):
    """An embedding tied to a head, a buffer, and tensors of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("coarse", torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0, 2))


def saved(where: Path, model: nn.Module, **engine: Any) -> Checkpoint:
    """As an engine saves it: a tied weight once, its other names as aliases."""
    first: dict[int, str] = {}
    tensors, aliases = {}, {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        known = first.setdefault(id(value), name)
        if known == name:
            tensors[f"model/{name}"] = whole_part(value)
        else:
            aliases[name] = known
    tensors["optimizer/embedding.weight/exp_avg"] = whole_part(torch.zeros(8, 4))
    objects = {"engine": {"aliases": aliases, **engine}}
    return save(Folder(where), 3, RankState(tensors, objects), info={}, group=None)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def checkpoint(tmp_path: Path, model: Tied) -> Checkpoint:
    return saved(tmp_path / "checkpoints", model)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def test_safetensors_load_strictly_tied_weights_included(
    checkpoint: Checkpoint, model: Tied, tmp_path: Path
) -> None:
    moved: list[int] = []
    target = export_safetensors(checkpoint, tmp_path / "m.safetensors", progress=moved.append)
    found = load_file(target)
    assert equal(found, model.state_dict())
    assert sum(moved) == sum(t.nbytes for t in found.values())
    other = Tied()
    other.load_state_dict(found)
    assert other.head.weight is other.embedding.weight
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_torch_keeps_ties_and_loads_without_code(
    checkpoint: Checkpoint, model: Tied, tmp_path: Path
) -> None:
    found = torch.load(export_torch(checkpoint, tmp_path / "m.pt"), weights_only=True)
    assert equal(found, model.state_dict())
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_dtype_converts_floating_point_alone(
    checkpoint: Checkpoint, model: Tied, tmp_path: Path, format: str
) -> None:
    target = export_weights(checkpoint, tmp_path / "m", format, dtype="float16")
    load = load_file if format == "safetensors" else torch.load
    found = load(target)
    expected = {n: t.half() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    assert equal(found, expected)


def test_a_part_of_the_model_under_its_own_names(
    checkpoint: Checkpoint, model: Tied, tmp_path: Path
) -> None:
    found = load_file(export_safetensors(checkpoint, tmp_path / "n", part="norm"))
    assert equal(found, model.norm.state_dict())
    with pytest.raises(CheckpointError, match="no tensors of a model below 'nrm'; it has mask"):
        export_safetensors(checkpoint, tmp_path / "o", part="nrm")


def test_what_modules_save_beside_tensors(tmp_path: Path, model: Tied) -> None:
    checkpoint = saved(tmp_path / "c", model, extra={"norm._extra_state": {"calls": 3}})
    found = torch.load(export_torch(checkpoint, tmp_path / "m.pt"), weights_only=True)
    assert found["norm._extra_state"] == {"calls": 3}
    with pytest.warns(UserWarning, match=r"left out.*norm\._extra_state"):
        export_safetensors(checkpoint, tmp_path / "m.safetensors")


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    wide = RankState({"model/w": whole_part(torch.zeros(2, dtype=torch.complex128))})
    checkpoint = save(Folder(tmp_path / "c"), 0, wide, info={}, group=None)
    with pytest.raises(CheckpointError, match="'w' is of dtype complex128, which safetensors"):
        export_safetensors(checkpoint, tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["c"]
    assert torch.load(export_torch(checkpoint, tmp_path / "m.pt"))["w"].dtype == torch.complex128


# ------------------------------------------------------------------ Hugging Face


def causal_models() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    small = dict(vocab_size=32, bos_token_id=0, eos_token_id=0)
    llama = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return {
        "gpt2": GPT2LMHeadModel(
            GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **small)
        ),
        "llama": LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **llama, **small)),
        "llama, tied": LlamaForCausalLM(
            LlamaConfig(num_key_value_heads=1, tie_word_embeddings=True, **llama, **small)
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, tied"])
def test_hugging_face_loads_its_folder(name: str, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    model = causal_models()[name].eval()
    checkpoint = saved(tmp_path / "c", model)
    model.config.save_pretrained(tmp_path / "config")
    target = export_hf(checkpoint, tmp_path / "hf", config=tmp_path / "config")
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(target).eval()
    assert equal(loaded.state_dict(), model.state_dict())
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == is_tied
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    body = AutoModel.from_pretrained(target)
    assert equal(body.state_dict(), model.base_model.state_dict())


def test_hugging_face_in_shards_and_in_another_dtype(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = causal_models()["gpt2"]
    checkpoint = saved(tmp_path / "c", model)
    model.config.save_pretrained(tmp_path / "config")
    config = tmp_path / "config" / "config.json"
    target = export_hf(
        checkpoint, tmp_path / "hf", config=config, max_shard=5000, dtype=torch.bfloat16
    )
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 3
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for shard in shards for t in load_file(target / shard).values()
    )
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert equal(loaded.state_dict(), model.to(torch.bfloat16).state_dict())


def test_config_of_the_pretrained_model_that_the_run_names(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = causal_models()["gpt2"]
    model.config.save_pretrained(tmp_path / "start")
    run = tmp_path / "run"
    checkpoint = saved(run / "checkpoints", model)
    with pytest.raises(CheckpointError, match=r"no Hugging Face config is known .*--hf-config"):
        export_hf(checkpoint, tmp_path / "hf")
    (run / "config.yaml").write_text(
        "model:\n  target: transformers:AutoModelForCausalLM.from_pretrained\n"
        f"  args: {{pretrained_model_name_or_path: {tmp_path / 'start'}}}\n"
    )
    loaded = AutoModelForCausalLM.from_pretrained(export_hf(checkpoint, tmp_path / "hf"))
    assert equal(loaded.state_dict(), model.state_dict())


def test_no_code_that_a_run_names_is_executed(tmp_path: Path, model: Tied) -> None:
    checkpoint = saved(tmp_path / "checkpoints", model)
    marker = tmp_path / "executed"
    (tmp_path / "config.yaml").write_text(
        f"model:\n  target: pathlib:Path.touch\n  args: {{self: {marker}}}\n"
    )
    with pytest.raises(CheckpointError, match="no Hugging Face config is known"):
        export_hf(checkpoint, tmp_path / "hf")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*: No such file"),
        ("{", "is not JSON"),
        ("{}", "is no Hugging Face config: it has no 'model_type'"),
    ],
)
def test_wrong_hf_config(
    checkpoint: Checkpoint, tmp_path: Path, content: str | None, message: str
) -> None:
    config = tmp_path / "config.json"
    if content is not None:
        config.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        export_hf(checkpoint, tmp_path / "hf", config=config)
    assert not (tmp_path / "hf").exists()


# ------------------------------------------------------------------ whole or not there


def test_nothing_is_overwritten_without_force(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    target.write_text("mine")
    with pytest.raises(CheckpointError, match="is there already"):
        export_safetensors(checkpoint, target)
    assert target.read_text() == "mine"
    export_safetensors(checkpoint, target, force=True)
    assert "embedding.weight" in load_file(target)


def test_force_replaces_only_what_an_export_wrote(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mine", "torch_dtype": "bfloat16"}')
    folder = export_hf(checkpoint, tmp_path / "hf", config=config)
    assert json.loads((folder / "config.json").read_text()) == {
        "model_type": "mine",
        "dtype": "float32",
    }
    export_hf(checkpoint, folder, config=config, force=True, max_shard=100)
    assert not (folder / "model.safetensors").exists()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt, which no export wrote"):
        export_hf(checkpoint, folder, config=config, force=True)
    with pytest.raises(CheckpointError, match="is a folder; only a file can be replaced"):
        export_torch(checkpoint, folder, force=True)
    with pytest.raises(CheckpointError, match="is a file; only a folder can be replaced"):
        export_hf(checkpoint, config, config=config, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "config.json", "hf"]


@pytest.mark.parametrize("format", ["safetensors", "hf", "torch"])
def test_a_failed_export_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mine"}')
    before = sorted(os.listdir(tmp_path))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_weights(
            checkpoint, tmp_path / "out", format, config=config if format == "hf" else None
        )
    assert sorted(os.listdir(tmp_path)) == before


def test_damaged_bytes_are_not_exported(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (file,) = Path(checkpoint.path).glob("*.bin")
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: block at byte 0"):
        export_safetensors(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("m", {"format": "onnx"}, "format 'onnx' must be one of safetensors, hf, torch"),
        ("no/m", {"format": "torch"}, "there is no folder"),
        ("m", {"format": "torch", "dtype": "int8"}, "dtype int8: give a floating-point one"),
        ("m", {"format": "torch", "dtype": "flot"}, "dtype flot: give a floating-point one"),
        ("m", {"format": "torch", "config": "c.json"}, "is for the format hf, not torch"),
        ("m", {"format": "hf", "max_shard": 0}, "at most 0 bytes"),
        ("s3://bucket/m", {"format": "torch"}, "give a local path"),
    ],
)
def test_wrong_inputs(
    checkpoint: Checkpoint, tmp_path: Path, target: str, options: dict[str, Any], message: str
) -> None:
    where = target if "://" in target else tmp_path / target
    with pytest.raises(CheckpointError, match=message):
        export_weights(checkpoint, where, **options)
    assert os.listdir(tmp_path) == ["checkpoints"]
