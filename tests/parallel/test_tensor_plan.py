"""Plans: found from data flow, taken from the model or the user, printed, refused. No ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import LayoutError
from paceline.models.gpt import GPT
from paceline.parallel.tensor import TensorPlan, common_plan, make_plan
from parallel import tensor_cases as cases


def plan_of(name, tp=2, **options):
    model, batches, loss = cases.case(name)
    return make_plan(model, tp, sample=lambda m: loss(m, batches()), **options)


def test_gpt_plan_is_found_and_prints():
    assert str(plan_of("gpt tied")) == (
        "tensor-parallel plan for tp=2 (found by data flow)\n"
        "each of 2 ranks holds 51% of the parameters: 97% are split, the rest is whole on every "
        "rank\n"
        "  tokens                     vocabulary\n"
        "  blocks.0..1.attention.qkv  packed:3\n"
        "  blocks.0..1.attention.out  row\n"
        "  blocks.0..1.mlp.up         column\n"
        "  blocks.0..1.mlp.out        row\n"
        "  head                       vocabulary\n"
        "  positions                  replicate   it is not indexed by the model's inputs, as a "
        "table of positions is not"
    )


def test_all_kinds_of_attention_and_gates_are_found():
    roles = plan_of("vision").roles
    assert roles == {
        "blocks.0.qkv": "packed:3",
        "blocks.0.proj": "row",
        "blocks.1.gate_up": "packed:2",
        "blocks.1.down": "row",
        "blocks.2.query": "column",
        "blocks.2.key": "column",
        "blocks.2.value": "column",
        "blocks.2.out": "row",
        "blocks.3.gate_up": "packed:2",
        "blocks.3.down": "row",
        "head": "replicate",
    }


def test_what_stays_whole_has_a_reason():
    reasons = plan_of("encoder", 8).reasons
    assert reasons["0.layers.0.self_attn"] == "its 4 heads do not divide by tp=8"
    assert plan_of("encoder").roles["0.layers.0.self_attn"] == "attention"
    recurrent = make_plan(nn.LSTM(4, 8), 2, sample=lambda m: m(torch.zeros(3, 4)))
    assert "LSTM is not a linear layer" in recurrent.reasons[""]
    assert (recurrent.split_share, recurrent.held_share) == (0, 1)
    assert reasons["1"] == "mse_loss needs its output whole"
    assert "Conv2d" in plan_of("convnet").reasons["0"]
    assert plan_of("vision").reasons["head"] == "10 classes are fewer than 16 a rank"
    assert "vocabulary=False" in plan_of("gpt tied", vocabulary=False).reasons["tokens"]


def test_a_model_under_other_names_gets_the_same_plan():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.row, self.column = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x):
            return x + self.column(torch.relu(self.row(x)))

    plan = make_plan(Odd(), 2, sample=lambda m: m(torch.zeros(3, 8)))
    assert plan.roles == {"row": "column", "column": "row"}


def test_hugging_face_models_bring_their_own_plan_or_get_one():
    assert plan_of("llama").source == "the model's own"
    found = plan_of("gpt2")
    assert found.source == "found by data flow"
    assert found.roles["transformer.h.0.attn.c_attn"] == "packed:3"
    assert found.roles["transformer.h.0.mlp.c_proj"] == "row"
    model, batches, loss = cases.case("qwen3")
    own = make_plan(model, 2)
    model._tp_plan = {}
    inferred = make_plan(model, 2, sample=lambda m: loss(m, batches()))
    assert inferred.source == "found by data flow"
    split = {n: r for n, r in own.roles.items() if r != "replicate"}
    assert split == {n: r for n, r in inferred.roles.items() if r != "replicate"}


def test_a_style_of_the_models_own_plan_that_is_unknown_stays_whole_and_says_so():
    model, _, _ = cases.case("llama")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": "swirl"}
    plan = make_plan(model, 2)
    assert "swirl" in plan.reasons["model.layers.0.mlp.up_proj"]
    assert "model.layers.0.mlp.up_proj" not in plan.roles


def test_patterns_of_the_user():
    model = GPT(vocab_size=64, context=8, layers=2, heads=2, width=8)
    plan = make_plan(model, 2, user={"*.mlp.up": "column", "*.mlp.out": "row"})
    assert plan.roles == {
        f"blocks.{i}.mlp.{name}": role
        for i in range(2)
        for name, role in [("up", "column"), ("out", "row")]
    }
    assert plan.reasons["head"] == "no pattern names it"
    with pytest.raises(LayoutError, match=r"'\*.mlp.down' matches no module.*mlp.out"):
        make_plan(model, 2, user={"*.mlp.down": "row"})
    with pytest.raises(LayoutError, match=r"'colum' is not a role; did you mean 'column'"):
        make_plan(model, 2, user={"*.mlp.up": "colum"})
    with pytest.raises(LayoutError, match=r"tokens is an embedding and cannot be 'row'"):
        make_plan(model, 2, user={"tokens": "row"})


def test_heads_and_features_that_do_not_divide_are_refused_with_the_numbers():
    gpt = GPT(vocab_size=64, context=8, layers=1, heads=6, width=24)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(LayoutError) as refusal:
        make_plan(gpt, 4, sample=lambda m: m(tokens))
    assert "blocks.0.attention.qkv: 72 output features in 3 chunks that form 6 heads" in str(
        refusal.value
    )
    assert "tp=2, 3, 6 would do" in str(refusal.value)
    mlp = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 4))
    with pytest.raises(LayoutError, match=r"0: 10 output features, not a multiple of tp=4"):
        make_plan(mlp, 4, sample=lambda m: m(torch.zeros(2, 4)))
    with pytest.raises(LayoutError, match="10 output features, which do not divide by tp=4"):
        make_plan(mlp, 4, user={"0": "column"})


def test_key_heads_fewer_than_ranks_are_shared_where_they_divide():
    model, batches, loss = cases.case("llama")  # 8 heads of queries, 4 of keys
    roles = make_plan(model, 8, sample=lambda m: loss(m, batches())).roles
    assert roles["model.layers.0.self_attn.q_proj"] == "column"
    assert roles["model.layers.1.self_attn.k_proj"] == "heads:4"
    with pytest.raises(LayoutError) as refusal:
        make_plan(model, 3, sample=lambda m: loss(m, batches()))
    assert "k_proj: 16 output features that form 4 heads" in str(refusal.value)
    assert "tp=2, 4, 8 would do" in str(refusal.value)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_key_heads_of_written_out_attention_are_found_too(kv_heads):
    model = cases.EinsumAttention(kv_heads=kv_heads).double()
    plan = make_plan(model, 4, sample=lambda m: m(torch.zeros(1, 3, 32).double()))
    assert plan.roles["query"] == "column"
    expected = {1: "replicate", 2: "heads:2", 4: "column"}[kv_heads]
    assert plan.roles["key"] == plan.roles["value"] == expected


def test_stacked_experts_are_split_and_ties_are_named():
    mixtral, batches, loss = cases.case("mixtral")
    plan = make_plan(mixtral, 2, sample=lambda m: loss(m, batches()))
    assert plan.roles["model.layers.0.mlp.experts"] == "experts"
    assert plan.held_share < 0.55
    assert "mlp.gate" in plan.summary()
    assert "no multiple of 8" in make_plan(mixtral, 4).reasons["model.layers.0.mlp.experts"]
    # Its embedding has a forward of its own, and shares its weight with the output layer.
    gemma, batches, loss = cases.case("gemma2")
    plan = make_plan(gemma, 2, sample=lambda m: loss(m, batches()))
    assert plan.ties == {"model.embed_tokens.weight": (0, 1)}


def test_ranks_with_different_plans_split_what_they_agree_on():
    first = TensorPlan(2, {"up": "column", "out": "row", "head": "gather"})
    second = TensorPlan(2, {"up": "column", "out": "row"})
    common = common_plan([first, second])
    assert common.roles == {"up": "column", "out": "row", "head": "replicate"}
    assert "different plans" in common.reasons["head"]
    assert common_plan([first, first]) is first


def test_a_model_on_the_meta_device_gets_the_same_plan():
    with torch.device("meta"):
        model = GPT(vocab_size=259, context=16, layers=2, heads=4, width=32)
    tokens = torch.zeros(2, 16, dtype=torch.long)

    def sample(m):
        return F.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten())

    assert make_plan(model, 2, sample=sample).roles == plan_of("gpt tied").roles
    assert all(p.is_meta for p in model.parameters())


def test_finding_a_plan_leaves_the_model_and_the_random_state_alone():
    model, batches, loss = cases.case("convnet")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batch = batches()
    state = torch.get_rng_state()

    def looking_at_values(m):
        assert float(loss(m, batch)) > 0  # cannot be answered without values

    make_plan(model, 2, sample=looking_at_values)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(not m._forward_hooks for m in model.modules())


def test_a_plan_is_data():
    plan = TensorPlan(2, {"a.0.b": "column", "a.1.b": "column", "c": "row"}, {"d": "so"})
    assert "a.0..1.b  column" in str(plan)
    assert "nothing is split" in str(TensorPlan(2, {}))
