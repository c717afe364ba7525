"""Adapters of peft on every layout: trained as on one process, resumed exactly, saved for peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.weights.export import export_weights
from paceline.errors import CheckpointError, TrainingError
from paceline.parallel.tensor.planning import make_plan

pytest.importorskip("peft")
pytest.importorskip("transformers")

LAYOUTS = ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2"]


def base_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).double()


def lora_model(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = {
        "r": 2,
        "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
        "lora_dropout": 0.1,
        "init_lora_weights": False,
        **options,
    }
    return get_peft_model(base_model(), LoraConfig(**settings), autocast_adapter_dtype=False)


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def engine_on(layout: str) -> paceline.Engine:
    return paceline.Engine(
        lora_model(modules_to_save=["lm_head"]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        layout=layout,
    )


def share(whole: dict[str, Tensor], engine: paceline.Engine) -> dict[str, Tensor]:
    start, stop = paceline.data.share(4, engine.coordinate.dp, engine.layout.dp)
    return {name: tensor[start:stop] for name, tensor in whole.items()}


def steps(engine: paceline.Engine, last: int) -> None:
    while engine.steps_done < last:
        engine.step(share(batch(engine.steps_done), engine))


def train(layout: str, folder: str) -> dict[str, Any]:
    """Three steps, saved after two; then the third again from there."""
    engine = engine_on(layout)
    with paceline.Checkpoints(f"{folder}/checkpoints", engine) as checkpoints:
        steps(engine, 2)
        checkpoints.save(wait=True)
        steps(engine, 3)
    paceline.save_adapter(engine, f"{folder}/adapter")
    found = engine.whole_parameters()
    predicted = engine.predict(share(batch(9), engine), take="logits")
    again = engine_on(layout)
    with paceline.Checkpoints(f"{folder}/checkpoints", again) as checkpoints:
        checkpoints.restore()
        steps(again, 3)
    resumed = again.whole_parameters()
    return {
        "parameters": found,
        "resumed": all(torch.equal(resumed[name], value) for name, value in found.items()),
        "predicted": (engine.coordinate.dp, predicted),
    }


def in_layouts(folder: str) -> dict[str, dict[str, Any]]:
    made = {}
    for layout in LAYOUTS:
        own = Path(folder) / layout
        own.mkdir(exist_ok=True)
        made[layout] = train(layout, str(own))
    return made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, train("dp=1", str(folder))


@pytest.mark.world(2)
def test_lora_is_the_same_run_on_every_layout(
    ranks: Any, tmp_path: Path, alone: tuple[Path, dict[str, Any]]
) -> None:
    from peft import PeftModel

    _, expected = alone
    by_rank = ranks(in_layouts, str(tmp_path))
    logits = expected["predicted"][1]
    for layout in LAYOUTS:
        for found in (of_rank[layout] for of_rank in by_rank):
            assert found["resumed"], layout
            for name, value in expected["parameters"].items():
                torch.testing.assert_close(
                    found["parameters"][name], value, rtol=0, atol=1e-9, msg=f"{layout}: {name}"
                )
        by_dp = dict(of_rank[layout]["predicted"] for of_rank in by_rank)
        together = torch.cat([by_dp[dp] for dp in sorted(by_dp)])
        torch.testing.assert_close(together, logits, rtol=0, atol=1e-9, msg=layout)
        adapter = tmp_path / layout / "adapter"
        names = sorted(path.name for path in adapter.iterdir())
        assert names == ["adapter_config.json", "adapter_model.safetensors"]
        loaded = PeftModel.from_pretrained(
            base_model(), str(adapter), autocast_adapter_dtype=False
        ).eval()
        with torch.no_grad():
            output = loaded(input_ids=batch(9)["input_ids"]).logits
        torch.testing.assert_close(output, logits, rtol=0, atol=1e-9, msg=layout)


def test_a_checkpoint_is_exported_as_an_adapter(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    checkpoint = Folder(alone[0] / "checkpoints").checkpoints()[-1]
    target = export_weights(checkpoint, tmp_path / "adapter", "peft")
    model = lora_model(modules_to_save=["lm_head"])
    paceline.load_weights(model, alone[0] / "checkpoints")
    model.save_pretrained(str(tmp_path / "by-peft"))
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "by-peft")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    config, peft_config = (
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("adapter", "by-peft")
    )
    for told in (config, peft_config):
        told["target_modules"] = sorted(told["target_modules"])
    assert config == peft_config
    PeftModel.from_pretrained(base_model(), str(target))
    with pytest.raises(CheckpointError, match="is there already"):
        export_weights(checkpoint, target, "peft")
    (target / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds mine\.txt, which no export wrote"):
        export_weights(checkpoint, target, "peft", force=True)
    with pytest.raises(CheckpointError, match="no adapter below 'encoder'"):
        export_weights(checkpoint, tmp_path / "other", "peft", part="encoder")


def test_what_has_no_adapter_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    engine = paceline.Engine(
        model, loss=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(CheckpointError, match="this Linear holds no adapter"):
        paceline.save_adapter(engine, tmp_path / "adapter")
    with pytest.raises(TrainingError, match="a Linear stands where the engine"):
        paceline.save_adapter(model, tmp_path / "adapter")  # type: ignore[arg-type]


def test_lora_layers_are_split_as_their_layers_are() -> None:
    plan = make_plan(lora_model(), 2, sample=lambda model: model(**batch(0)))
    block = "base_model.model.model.layers.0"
    expected = {
        "self_attn.q_proj.base_layer": "column",
        "self_attn.q_proj.lora_A.default": "replicate",
        "self_attn.q_proj.lora_B.default": "column",
        "self_attn.k_proj": "column",
        "self_attn.o_proj.base_layer": "row",
        "self_attn.o_proj.lora_A.default": "row",
        "self_attn.o_proj.lora_B.default": "replicate",
    }
    assert {name: plan.roles[f"{block}.{name}"] for name in expected} == expected
    dora = make_plan(lora_model(use_dora=True), 2, sample=lambda model: model(**batch(0)))
    assert f"{block}.self_attn.q_proj.base_layer" not in dora.roles
    reason = dora.reasons[f"{block}.self_attn.q_proj.base_layer"]
    assert reason.startswith("the model has adapters other than LoRA")
    assert set(dora.roles.values()) == {"vocabulary"}  # nor is one layer of a block split alone
