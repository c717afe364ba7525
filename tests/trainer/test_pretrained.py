"""Weights in safetensors files, as Hugging Face lays them out, into models on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.checkpoint.boxes import Box
from paceline.checkpoint.weights.safetensors_weights import SafetensorsWeights
from paceline.errors import CheckpointError, TrainingError

pytest.importorskip("transformers")


def llama(seed: int, *, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files with an index."""
    path = tmp_path_factory.mktemp("llama")
    llama(7).save_pretrained(path, max_shard_size="2KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def loaded(folder: str, layout: str, on_meta: bool) -> tuple[dict[str, Tensor], int]:
    """What an engine holds after loading, and how many elements this rank has read."""
    read = SafetensorsWeights.read
    elements = 0

    def counted(self: Any, name: str, box: Box) -> Tensor:
        nonlocal elements
        found = read(self, name, box)
        elements += found.numel()
        assert tuple(found.shape) == box.shape
        return found

    with torch.device("meta" if on_meta else "cpu"):
        model = llama(1)
    if not on_meta:
        model = model.double()
    engine = paceline.Engine(
        model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-30), layout=layout
    )
    SafetensorsWeights.read = counted  # type: ignore[method-assign]
    try:
        paceline.load_weights(engine, folder)
        tokens = torch.zeros(1, 4, dtype=torch.long)
        engine.step({"input_ids": tokens, "labels": tokens})  # spreads a model for tp
    finally:
        SafetensorsWeights.read = read  # type: ignore[method-assign]
    return engine.whole_parameters(), elements


@pytest.mark.world(2)
def test_a_rank_reads_its_part_alone(ranks: Any, folder: Path) -> None:
    cases = [("dp=2,zero=3", False), ("dp=2,zero=3", True), ("tp=2", True)]

    def job(folder: str) -> list[tuple[dict[str, Tensor], int]]:
        return [loaded(folder, layout, on_meta) for layout, on_meta in cases]

    expected = dict(llama(7).named_parameters())
    total = sum(value.numel() for value in expected.values())
    by_rank = ranks(job, str(folder))
    for number, (layout, on_meta) in enumerate(cases):
        for found, elements in (of_rank[number] for of_rank in by_rank):
            for name, value in expected.items():
                assert torch.equal(found[name].to(value.dtype), value.detach()), (layout, name)
            assert 0 < elements < 0.65 * total, (layout, on_meta, elements, total)


def test_into_a_module_of_another_dtype_with_tied_weights(tmp_path: Path) -> None:
    saved = llama(7, tied=True).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    model = llama(1, tied=True)
    assert paceline.load_weights(model, tmp_path) == str(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.float()), name
    paceline.load_weights(model, tmp_path / "model.safetensors")


def test_into_a_model_with_adapters(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        llama(1), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    adapter = {n: p.detach().clone() for n, p in model.named_parameters() if "lora" in n}
    paceline.load_weights(model, folder)
    for name, value in llama(7).state_dict().items():
        here = f"base_model.model.{name}".replace("q_proj.", "q_proj.base_layer.")
        for one in (
            here.replace("lm_head", "lm_head.original_module"),
            here.replace("lm_head", "lm_head.modules_to_save.default"),
        ):
            assert torch.equal(model.state_dict()[one], value), one
    for name, value in adapter.items():
        assert torch.equal(model.get_parameter(name), value)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = llama(1)
        self.score = nn.Linear(8, 2)


def test_names_that_differ_are_reported_or_mapped(folder: Path, tmp_path: Path) -> None:
    model = Wrapped()
    with pytest.raises(CheckpointError, match=r"the files lack backbone.*the model has no lm_head"):
        paceline.load_weights(model, folder)
    with pytest.raises(
        CheckpointError, match=r"the files lack score.weight, score.bias\. With strict"
    ):
        paceline.load_weights(model, folder, rename={"^": "backbone."})
    with pytest.warns(
        UserWarning, match=r"lack score.weight, score.bias. These are left as they are"
    ):
        paceline.load_weights(model, folder, rename={"^": "backbone."}, strict=False)
    assert torch.equal(model.backbone.lm_head.weight, llama(7).lm_head.weight)
    with pytest.raises(TrainingError, match="must be regular expressions"):
        paceline.load_weights(model, folder, rename={"(": ""})
    with pytest.raises(TrainingError, match="both 'xx'"):
        paceline.load_weights(model, folder, rename={".*": "x"})
    with pytest.raises(CheckpointError, match="which have no key"):
        paceline.load_weights(model, folder, key="env:KEY")
    with pytest.raises(TrainingError, match="rename= is for safetensors files"):
        paceline.load_weights(model, tmp_path, rename={"a": "b"})
    other = llama(1)
    other.lm_head = nn.Linear(8, 3, bias=False)
    before = other.lm_head.weight.detach().clone()
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight has shape \[16, 8\] there and \[3, 8\]"
    ):
        paceline.load_weights(other, folder)
    assert torch.equal(other.lm_head.weight, before)


def test_a_run_starts_from_a_folder(folder: Path) -> None:
    tokens = torch.zeros(4, dtype=torch.long)
    data = [{"input_ids": tokens, "labels": tokens}] * 2
    model = llama(1)
    trainer = paceline.Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-30),
        global_batch=2,
        progress=False,
        checkpoint=paceline.Checkpointing(start_from=str(folder)),
    )
    trainer.fit(data, steps=1)
    assert torch.equal(trainer.model.lm_head.weight, llama(7).lm_head.weight)
