"""The weights of a run in one line, into any model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from engine.test_layouts import make_engine
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import RankState, whole_part
from paceline.checkpoint.sharded.save_load import save
from paceline.errors import CheckpointDamaged, CheckpointError, TrainingError


class Net(nn.Module):
    """Parameters, a buffer that is saved and one that is not, tied weights, a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.note = "fresh"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.tokens(x)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    """A run folder with three steps, the second of them the best; and what was saved at each."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = Net()
    engine = paceline.Engine(
        model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.5)
    )
    options = paceline.Checkpointing(best="accuracy", mode="max", keep=5)
    states: dict[int, dict[str, Any]] = {}
    with paceline.Checkpoints(folder / "checkpoints", engine, options=options) as checkpoints:
        for step, accuracy in enumerate((0.3, 0.9, 0.5), 1):
            engine.step((torch.randint(6, (8,)), torch.randint(6, (8,))))
            model.note = f"step {step}"
            checkpoints.save(wait=True, metrics={"accuracy": accuracy})
            states[step] = copy.deepcopy(model.state_dict())
    return folder, states


def same(model: nn.Module, state: dict[str, Any]) -> bool:
    found = model.state_dict()
    assert found.keys() == state.keys()
    return all(
        torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        for name, value in state.items()
    )


@pytest.mark.parametrize(("which", "step"), [("best", 2), ("last", 3), (1, 1), (None, 3)])
def test_which_weights_a_plain_module_gets(run: Any, which: Any, step: int) -> None:
    folder, states = run
    model = Net()
    named = {} if which is None else {"which": which}
    path = paceline.load_weights(model, folder, **named)
    assert path == str(folder / "checkpoints" / f"step-{step:09d}")
    assert same(model, states[step])
    assert model.head.weight is model.tokens.weight
    assert model.note == f"step {step}"


def test_device_dtype_and_identity_are_the_models(run: Any) -> None:
    folder, states = run
    model = Net().to(torch.bfloat16)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.load_weights(model, folder, "best")
    assert dict(model.named_parameters()) == before  # the very same objects
    assert optimizer.param_groups[0]["params"][0] is model.tokens.weight
    assert torch.equal(model.tokens.weight, states[2]["tokens.weight"].bfloat16())
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_wrapped_models_are_seen_through(run: Any) -> None:
    folder, states = run
    model = Net()
    compiled: Any = torch.compile(model, backend="eager")
    paceline.load_weights(compiled, folder, "best")
    assert same(model, states[2])


def test_frozen_and_inference_models(run: Any) -> None:
    folder, states = run
    model = Net().eval().requires_grad_(False)
    with torch.inference_mode():
        paceline.load_weights(model, folder, "best")
    assert same(model, states[2])
    assert not any(p.requires_grad for p in model.parameters())


def test_an_engine_gets_the_best_too(run: Any) -> None:
    folder, states = run
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = paceline.Engine(model, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    assert paceline.load_weights(engine, folder, which="best").endswith("step-000000002")
    assert torch.equal(model.tokens.weight, states[2]["tokens.weight"])
    assert engine.steps_done == 0


# ------------------------------------------------------------------ what does not fit


def two(**changed: Any) -> Any:
    sizes = {"a": nn.Linear(2, 3), "b": nn.Linear(3, 1), **changed}
    return nn.Sequential(OrderedDict((n, layer) for n, layer in sizes.items() if layer is not None))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("plain")
    state = {f"model/{n}": whole_part(t) for n, t in two().state_dict().items()}
    save(Folder(where), 1, RankState(state), info={}, group=None)
    return where


def engine_of(model: nn.Module) -> paceline.Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return paceline.Engine(model, loss=nn.MSELoss(), optimizer=optimizer)


@pytest.mark.parametrize("wrap", [lambda model: model, engine_of], ids=["module", "engine"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"c": nn.Linear(1, 1)}, r"it lacks c\.weight, c\.bias"),
        ({"b": None}, r"model has no b\.bias, b\.weight"),
        ({"b": nn.Linear(4, 1)}, r"b\.weight has shape .1, 3.*there and .1, 4. here"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    plain: Path, wrap: Any, changed: Any, message: str
) -> None:
    model = two(**changed)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=message):
        paceline.load_weights(wrap(model), plain)
    assert same(model, before)


@pytest.mark.parametrize("wrap", [lambda model: model, engine_of], ids=["module", "engine"])
def test_not_strict_loads_what_both_have(plain: Path, wrap: Any) -> None:
    model = two(b=None, c=nn.Linear(1, 1))
    before = copy.deepcopy(model.c.state_dict())
    paceline.load_weights(wrap(model), plain, strict=False)
    expected = Folder(plain).get(1).read_tensor("model/a.weight")
    assert torch.equal(model.a.weight, expected)
    assert same(model.c, before)
    with pytest.raises(CheckpointError, match="has shape"):
        paceline.load_weights(wrap(two(b=nn.Linear(4, 1))), plain, strict=False)
    with pytest.raises(CheckpointError, match="it lacks x"):
        paceline.load_weights(
            wrap(nn.Sequential(OrderedDict(x=nn.Linear(2, 3)))), plain, strict=False
        )


def test_names_that_differ_by_what_comes_before_them(plain: Path) -> None:
    with pytest.raises(CheckpointError, match=r"names here begin with 'net': .*model\.net"):
        paceline.load_weights(nn.ModuleDict({"net": two()}), plain)
    with pytest.raises(CheckpointError, match="names there begin with 'a'"):
        paceline.load_weights(nn.Linear(2, 3), plain)


def test_a_model_that_ties_what_was_saved_as_two(tmp_path: Path) -> None:
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight  # type: ignore[assignment]
    parts = {f"model/{n}.weight": whole_part(torch.randn(2, 2)) for n in "ab"}
    save(Folder(tmp_path), 1, RankState(parts), info={}, group=None)
    with pytest.raises(CheckpointError, match=r"different values for a\.weight and b\.weight"):
        paceline.load_weights(tied, tmp_path)


def test_a_model_without_memory(plain: Path) -> None:
    with torch.device("meta"):
        model = two()
    with pytest.raises(CheckpointError, match=r"on the meta device.*to_empty"):
        paceline.load_weights(model, plain)


def test_a_damaged_checkpoint_is_named_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    state = {f"model/{n}": whole_part(t) for n, t in two().state_dict().items()}
    checkpoint = save(Folder(tmp_path), 1, RankState(state), info={}, group=None)
    (file,) = Path(checkpoint.path).glob("*.bin")
    *start, last = file.read_bytes()
    file.write_bytes(bytes([*start, last ^ 1]))
    model = two()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointDamaged, match=str(file)):
        paceline.load_weights(model, tmp_path)
    assert same(model, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "MODEL"], "stands where the model goes"),
        ([nn.Linear, "RUN"], "Linear is a class; make one"),
        ([None, "RUN"], "model is a NoneType"),
        ([{}, "RUN"], "model is a dict"),
        (["TRAINER", "RUN"], "Pass its model, or its engine"),
        (["MODEL", None], "where=None must be the path or URL"),
        (["MODEL", ""], "where='' must be"),
        (["MODEL", 7], "where=7 must be"),
        (["MODEL", "RUN", "newest"], "which='newest' must be one of last, best, or"),
        (["MODEL", "RUN", -1], "which=-1 must be"),
        (["MODEL", "RUN", True], "which=True must be"),
        (["MODEL", "RUN", None], "which=None must be"),
    ],
)
def test_wrong_arguments_are_answered(plain: Path, arguments: list[Any], message: str) -> None:
    model = two()
    trainer = paceline.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1),
        global_batch=4,
    )
    stand_ins = {"RUN": str(plain), "MODEL": model, "TRAINER": trainer}
    given = [stand_ins.get(a, a) if isinstance(a, str) else a for a in arguments]
    with pytest.raises(TrainingError, match=message):
        paceline.load_weights(*given)
    with pytest.raises(TrainingError, match="strict='no' must be True or False"):
        paceline.load_weights(model, plain, strict="no")  # type: ignore[arg-type]


def test_best_of_a_run_that_was_not_told(plain: Path) -> None:
    with pytest.raises(CheckpointError, match="not told by which metric"):
        paceline.load_weights(two(), plain, "best")


# ------------------------------------------------------------------ on ranks


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2", "pp=2"])
def test_an_engine_of_any_layout(ranks: Any, tmp_path: Path, layout: str) -> None:
    source = make_engine("dp=1", layers=2)
    with paceline.Checkpoints(
        tmp_path, source, options=paceline.Checkpointing(best="score", mode="max")
    ) as checkpoints:
        checkpoints.save(wait=True, metrics={"score": 1.0})

    def job() -> Any:
        engine = make_engine(layout, layers=2)
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.zero_()
        paceline.load_weights(engine, tmp_path, "best")
        return engine.state_dict()["model"] if layout != "pp=2" else None

    expected = source.state_dict()["model"]
    for found in ranks(job):
        if found is not None:
            assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.world(2)
def test_a_model_that_prepare_has_spread(ranks: Any, plain: Path) -> None:
    expected = Folder(plain).get(1).read_tensor("model/a.weight")

    def job() -> Tensor:
        model = two()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        spread: Any
        spread, _, _ = paceline.prepare(model, optimizer, layout="dp=2,zero=3")
        paceline.load_weights(spread, plain)
        return spread.a.weight.full_tensor().detach()

    assert all(torch.equal(found, expected) for found in ranks(job))
