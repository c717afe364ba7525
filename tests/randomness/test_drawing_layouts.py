"""With dropout and other draws: the same run on every layout, and after every rescale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawing_models import batch, make, train, train_all
from torch import nn

import paceline
from paceline import Layout
from paceline.errors import TrainingError
from paceline.randomness import ForwardRandomness

KINDS = ("gpt", "bert", "conv")
TOLERANCE = {"rtol": 0, "atol": 1e-9}

Run = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {kind: train(kind, "dp=1") for kind in KINDS}


def runs_on(layout: str, **options: Any) -> list[Run]:
    return [(kind, layout, options) for kind in KINDS]


TWO_RANKS: list[Run] = [
    *runs_on("dp=2"),
    *runs_on("dp=2,zero=3", microbatch=2),
    *runs_on("tp=2"),
    *runs_on("pp=2"),
    ("gpt", "tp=2", {"checkpoint_activations": "full"}),
    ("gpt", "pp=2", {"checkpoint_activations": "full", "microbatch": 2}),
    ("gpt", "pp=2", {"pipeline": paceline.Pipelining(schedule="zbv")}),
]
FOUR_RANKS: list[Run] = [
    *runs_on("dp=2,tp=2"),
    ("gpt", "dp=2,zero=2,pp=2", {"microbatch": 1}),
    ("bert", "tp=2,pp=2", {}),
    ("conv", "dp=4,zero=1", {}),
]


@pytest.mark.parametrize("runs", [TWO_RANKS, FOUR_RANKS], ids=["two ranks", "four ranks"])
def test_every_layout_draws_what_one_process_draws(
    ranks: Any, alone: dict[str, Any], runs: list[Run]
) -> None:
    size = Layout.parse(runs[0][1]).world_size
    for found in ranks(train_all, runs, world_size=size):
        for (kind, layout, options), (losses, model) in zip(runs, found, strict=True):
            about = f"{kind} on {layout} {options}"
            assert losses == pytest.approx(alone[kind][0], rel=0, abs=1e-9), about
            torch.testing.assert_close(model, alone[kind][1]["model"], msg=about, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_however_one_process_cuts_and_recomputes(alone: dict[str, Any], kind: str) -> None:
    options: list[dict[str, Any]] = [{"microbatch": 2}, {"microbatch": 1}]
    options += [{"checkpoint_activations": mode} for mode in ("full", "selective")]
    for chosen in options:
        losses, state = train(kind, "dp=1", **chosen)
        assert losses == pytest.approx(alone[kind][0], rel=0, abs=1e-9), chosen
        torch.testing.assert_close(state["model"], alone[kind][1]["model"], **TOLERANCE)


def test_dropout_was_really_on(alone: dict[str, Any]) -> None:
    assert train("gpt", "dp=1", randomness="fast")[0][0] != pytest.approx(alone["gpt"][0][0])


def go_on(runs: list[tuple[str, str, Any]]) -> list[Any]:
    return [train(kind, layout, steps=1, state=state) for kind, layout, state in runs]


def test_a_run_follows_the_undisturbed_one_over_2_1_3_and_4_ranks(ranks: Any) -> None:
    kinds = ("gpt", "conv")
    whole = {kind: train(kind, "dp=1", steps=4) for kind in kinds}
    layouts = [("dp=2", "dp=2,zero=3"), ("dp=1", "dp=1"), ("dp=3", "dp=3"), ("dp=2,tp=2", "dp=4")]
    states: dict[str, Any] = dict.fromkeys(kinds)
    for step, chosen in enumerate(layouts):
        size = Layout.parse(chosen[0]).world_size
        todo = [(k, layout, states[k]) for k, layout in zip(kinds, chosen, strict=True)]
        found = ranks(go_on, todo, world_size=size)[0]
        for kind, (losses, state) in zip(kinds, found, strict=True):
            assert losses[0] == pytest.approx(whole[kind][0][step], rel=0, abs=1e-9)
            states[kind] = state
    for kind in kinds:
        torch.testing.assert_close(states[kind]["model"], whole[kind][1]["model"], **TOLERANCE)


def test_a_state_from_before_goes_on_as_it_was_written() -> None:
    model, loss = make("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.Engine(model, optimizer=optimizer, loss=loss)
    state = engine.state_dict()
    assert state["randomness"]["kind"] == "layout-free"
    seed = state["randomness"]["seed"]
    engine.load_state_dict({**state, "randomness": {"kind": "layout-free", "seed": seed + 1}})
    assert engine.state_dict()["randomness"]["seed"] == seed + 1
    assert engine.take_notes() == []
    del state["randomness"]
    engine.load_state_dict(state)
    (note,) = engine.take_notes()
    assert "goes on as it was, with each rank's own streams" in note
    assert engine.state_dict()["randomness"]["kind"] == "fast"


class Checkpointing(nn.Module):
    """Recomputes by itself, one of its blocks twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())
        self.last = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_recomputes_by_itself(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients(recomputes: bool) -> Any:
        torch.manual_seed(0)
        model = Checkpointing(reentrant)
        if not recomputes:
            monkeypatch.setattr("torch.utils.checkpoint.checkpoint", lambda f, x, **_: f(x))
        engine = paceline.Engine(
            model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss()
        )
        torch.manual_seed(1)
        x = torch.randn(5, 6, requires_grad=True)
        engine.step((x, torch.zeros(5, 2)))
        return engine.state_dict()["model"]

    torch.testing.assert_close(gradients(True), gradients(False))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=False)
        self.lstm = nn.LSTM(8, 4, num_layers=2, dropout=0.2, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x.transpose(0, 1))
        x = self.lstm(x)[0].transpose(0, 1)
        return self.head(self.attention(x, x, x)[0].mean(1))


@pytest.mark.parametrize("time", [4, 5])
def test_samples_in_the_second_dimension(time: int) -> None:
    """Also where the sequence is as long as there are samples."""

    def losses(microbatch: int | None) -> list[float]:
        torch.manual_seed(0)
        model = TimeFirst()
        engine = paceline.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.CrossEntropyLoss(),
            precision="fp64",
            microbatch=microbatch,
            randomness="strict",
        )
        draw = torch.Generator().manual_seed(0)
        x, y = torch.randn(4, time, 8, generator=draw), torch.arange(4) % 3
        return [engine.step((x, y)).loss for _ in range(2)]

    whole = losses(None)
    assert losses(1) == pytest.approx(whole, rel=0, abs=1e-9)
    assert losses(2) == pytest.approx(whole, rel=0, abs=1e-9)


class OwnDraw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.rand(3)[:2]


def test_what_belongs_to_no_sample_is_named_or_refused() -> None:
    def step(randomness: Any) -> paceline.Engine:
        model = nn.Sequential(OwnDraw())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = paceline.Engine(
            model, optimizer=optimizer, loss=nn.MSELoss(), randomness=randomness
        )
        engine.step((torch.randn(5, 6), torch.zeros(5, 2)))
        engine.step((torch.randn(5, 6), torch.zeros(5, 2)))
        return engine

    (note,) = step("layout-free").take_notes()
    assert "0 (OwnDraw) draws rand() of shape (3,)" in note
    assert step("fast").take_notes() == []
    with pytest.raises(TrainingError, match=r"0 \(OwnDraw\) draws rand\(\) of shape"):
        step("strict")


def batches_of(dp: int) -> list[Any]:
    """A loader's own batches, and those that a user has made anew: where samples are is known."""
    data = [(torch.full((6,), float(i)), i % 2) for i in range(14)]
    found = []
    for anew in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        engine = paceline.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.CrossEntropyLoss(),
            precision="fp64",
            layout=f"dp={dp}",
        )
        for own in paceline.loader(data, global_batch=7, seed=0, layout=engine.layout):
            given = [value.clone() for value in own] if anew else own
            found.append(engine.step(given).loss)
    return found


@pytest.mark.world(2)
def test_batches_of_a_loader_and_of_ones_own(ranks: Any) -> None:
    for found in ranks(batches_of, 2):
        assert found == pytest.approx(batches_of(1), rel=0, abs=1e-9)


@pytest.mark.filterwarnings(  # of torch, about itself
    "ignore:.*script_method:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)
@pytest.mark.parametrize("by_block", [False, True], ids=["whole", "by block"])
def test_compiled_code_draws_the_same(by_block: bool) -> None:
    """Without a break in its graph, with one graph for all steps, and one for all blocks."""
    from torch._dynamo.utils import counters

    model: Any = make("gpt")[0]
    tokens, _ = batch("gpt", 0)
    random = ForwardRandomness(0, strict=True)

    def forward(step: int) -> torch.Tensor:
        random.begin("training", step, [(tokens, torch.arange(len(tokens)))])
        random.select(tokens)
        with random.forward():
            return model(tokens)

    random.watch(model, (), torch.device("cpu"), compiled=False)
    plain = [forward(step) for step in range(3)]
    torch._dynamo.reset()
    counters.clear()
    for module in model.blocks if by_block else [model]:
        module.compile(backend="aot_eager")  # to generate code of it as well takes minutes
    random.watch(model, (), torch.device("cpu"), compiled=True)
    torch.testing.assert_close([forward(step) for step in range(3)], plain)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    assert not counters["graph_break"]
