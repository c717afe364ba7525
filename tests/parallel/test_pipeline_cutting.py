"""Where a model is cut, what crosses, and which models are refused, and why. No process group."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.engine.loss import LossModule
from paceline.errors import LayoutError, TrainingError
from paceline.parallel.pipeline import CutPlan, Pipelining, cut
from paceline.parallel.pipeline.cut_plan import lightest_cuts
from parallel import pipeline_cases


def plan_of(name: str, pp: int = 2, **options: Any) -> CutPlan:
    case = pipeline_cases.make(name)
    batch = case.batch(0, 2)
    return cut(case.module, lambda: case.module(batch, 2), pp, Pipelining(**options))


def plan_for(model: nn.Module, pp: int = 2, **options: Any) -> CutPlan:
    module = LossModule(model, nn.CrossEntropyLoss())
    batch = torch.randn(3, 8), torch.randint(4, (3,))
    return cut(module, lambda: module(batch, 3), pp, Pipelining(**options))


class Layers(nn.Module):
    """Four layers and what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def test_a_decoder_passes_on_its_hidden_state_alone() -> None:
    for name in ("gpt", "gpt2", "llama", "qwen2", "bert"):
        plan = plan_of(name)
        assert [len(names) for names in plan.crossing] == [1], name
        assert plan.crossing_bytes == (2 * 8 * 16 * 8,), name


def test_an_encoder_output_goes_along_to_every_decoder_stage() -> None:
    plan = plan_of("t5", pp=4)
    last_encoder = plan.units.index("encoder.final_layer_norm")
    decoders = [s for s in range(1, 4) if plan.starts[s] > last_encoder]
    assert decoders
    for stage in decoders:
        assert any(name[1] == last_encoder + 1 for name in plan.crossing[stage - 1])


def test_cuts_balance_what_was_asked_for() -> None:
    parameters, flops = plan_of("gpt"), plan_of("gpt", balance="flops")
    assert max(parameters.costs) < 0.55 * sum(parameters.costs)
    assert max(flops.costs) < 0.55 * sum(flops.costs)
    assert flops.balance == "flops"
    assert plan_of("mlp", balance="time").stages == 2


def test_the_heaviest_stage_is_as_light_as_can_be() -> None:
    assert lightest_cuts([4, 1, 1, 1, 1], 2, [0] * 5) == [1]
    assert lightest_cuts([1, 1, 1, 1], 4, [0] * 4) == [1, 2, 3]
    # Two cuts leave the heaviest stage at 5: the one that sends less is taken.
    assert lightest_cuts([5, 0, 0, 5], 2, [0, 9, 3, 7]) == [2]


def test_a_plan_prints_and_travels() -> None:
    plan = plan_of("gpt", pp=4)
    text = str(plan)
    assert "blocks.0" in text
    assert "an output of 'blocks.0'" in text
    assert "held by several stages, gradients summed: tokens.weight" in text
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan_of("gpt", pp=4, cuts=plan.cuts).starts == plan.starts


def test_cut_points_of_the_user() -> None:
    plan = plan_of("gpt", cuts=["blocks.3"])
    assert plan.cuts == ("blocks.3",)
    assert plan.units_of(1) == ("blocks.3", "norm", "head")
    assert plan_of("t5", cuts=["decoder"]).units_of(1)[0] == "decoder.embed_tokens"
    assert plan_of("mlp", cuts=["3"]).units_of(1)[0] == "3"  # an activation, which holds nothing
    repeated = plan_of("repeated", cuts=["block@3"])
    assert repeated.holders["block.weight"] == (0, 1)
    assert repeated.cuts == ("block@3",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuts": ["block.2"]}, "'block.2' is no module of the model. Did you mean 'blocks.2'"),
        ({"cuts": ["blocks.2.mlp"]}, "lies inside 'blocks.2'"),
        ({"cuts": ["blocks.1", "blocks.2"]}, "2 cuts make 3 stages, but pp=2"),
        ({"cuts": ["tokens"]}, "stage 0 would be empty"),
        (
            {"cuts": ["blocks.1", "blocks.3", "blocks.2"], "schedule": "zbv"},
            "'blocks.2' .* does not come after 'blocks.3'",
        ),
        ({"cuts": ["blocks.1@2"]}, "is called 1 times"),
        ({"schedule": "interleaved-1f1b", "stages_per_rank": 9}, "needs 18 stages, but .* only 8"),
    ],
)
def test_wrong_cuts_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_of("gpt", **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"schedule": "1f1p"}, LayoutError),
        ({"balance": "weight"}, TrainingError),
        ({"microbatches": 0}, TrainingError),
        ({"stages_per_rank": True}, TrainingError),
        ({"cuts": [3]}, TrainingError),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Pipelining(**options)


def test_microbatches_that_a_schedule_can_run() -> None:
    assert Pipelining().microbatches_for(4) == 4
    assert Pipelining(schedule="gpipe").microbatches_for(4) == 1
    assert Pipelining(schedule="dualpipev").microbatches_for(2) == 4
    assert Pipelining(schedule="interleaved-1f1b").microbatches_for(4, 9) == 10
    assert Pipelining(microbatches=6).microbatches_for(4, 2) == 6
    with pytest.raises(TrainingError, match="microbatches=6, but this step has 7"):
        Pipelining(microbatches=6).microbatches_for(4, 7)


def test_control_flow_on_computed_values_is_refused() -> None:
    class Looking(Layers):
        def between(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(
        LayoutError, match=r"looks at values that a module computed .*x.sum\(\) > 0"
    ):
        plan_for(Looking())


def test_a_value_that_leaves_a_module_by_a_side_way_is_refused() -> None:
    class Remembering(nn.Linear):
        aux: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.aux = x.square().mean()
            return super().forward(x)

    class Aux(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Remembering(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + sum(layer.aux for layer in self.layers)

    model = Aux()
    with pytest.raises(LayoutError, match=r"'layers.0' computes leaves it by a side way"):
        plan_for(model)
    assert not any(isinstance(layer.aux, Tensor) for layer in model.layers)


def test_a_buffer_that_glue_changes_is_refused() -> None:
    class Counting(Layers):
        def between(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x

    with pytest.raises(LayoutError, match="changes its buffer 'seen'"):
        plan_for(Counting())


def test_a_module_whose_shapes_depend_on_values_is_refused() -> None:
    class Picking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x[:, 0] > 0])

    with pytest.raises(LayoutError, match=r"what '1' returns cannot be foreseen"):
        plan_for(nn.Sequential(nn.Linear(8, 8), Picking(8, 4)))


def test_writing_into_a_part_of_a_tensor_is_refused_only_where_it_cannot_be_followed() -> None:
    class Writing(Layers):
        def between(self, x: Tensor) -> Tensor:
            whole = torch.zeros(3, 16)
            whole[:, :8].copy_(x)
            return whole[:, :8]

    with pytest.raises(LayoutError, match="writes what a module computed into a part"):
        plan_for(Writing())


def test_cutting_leaves_the_model_as_it_was() -> None:
    model = Layers()
    model.layers[1].register_forward_hook(lambda *args: None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    kinds = [type(module) for module in model.modules()]
    plan_for(model)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(isinstance(p, nn.Parameter) and not p.is_meta for p in model.parameters())
    torch.randn(3), torch.randint(4, (3,))
    assert state.shape == torch.get_rng_state().shape
    model(torch.randn(3, 8)).sum().backward()
