"""Checkpoints of a loop of one's own: any layout to any other, whatever is saved with it."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from engine.test_layouts import batches, make_engine, make_gpt, own_share
from paceline import Layout, events
from paceline.errors import CheckpointError, TrainingError
from paceline.models.gpt import token_cross_entropy

LAYOUTS = [
    "dp=1",
    "dp=2",
    "dp=2,zero=1",
    "tp=2",
    "pp=2",
    "dp=3",
    "dp=4,zero=2",
    "dp=4,zero=3,replicas=2",
    "dp=2,zero=3,tp=2",
    "tp=2,pp=2",
]


def size_of(layout: str) -> int:
    place = Layout.parse(layout)
    return place.dp * place.tp * place.pp


def trained(layout: str, steps: int) -> paceline.Engine:
    engine = make_engine(layout, layers=2)
    for batch in batches(6)[:steps]:
        engine.step(own_share(batch, engine.layout))
    return engine


def save_on(layout: str, folder: str) -> Any:
    return save_of(trained(layout, 2), folder)


def save_of(engine: paceline.Engine, folder: str) -> Any:
    with paceline.Checkpoints(folder, engine) as checkpoints:
        checkpoints.save(wait=True)
        [(outcome, _, _)] = checkpoints.finished()
    assert outcome.error is None
    return copy.deepcopy(engine.state_dict())  # where it is plain, it is live


def load_into(engine: paceline.Engine, folders: list[str]) -> list[Any] | None:
    found = []
    for folder in folders:
        with paceline.Checkpoints(folder, engine) as checkpoints:
            restored = checkpoints.restore()
        assert restored is not None
        assert restored.step == engine.steps_done == 2
        found.append(copy.deepcopy(engine.state_dict()))
    # A whole state is put together from all ranks' parts: one rank's answer is everyone's.
    return found if engine.world.is_main else None


def assert_equal_to_the_bit(found: Any, wanted: Any, path: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), path
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key, value in wanted.items():
            assert_equal_to_the_bit(found[key], value, f"{path}.{key}")
    elif isinstance(wanted, list | tuple):
        for index, pair in enumerate(zip(found, wanted, strict=True)):
            assert_equal_to_the_bit(*pair, f"{path}.{index}")
    else:
        assert found == wanted, path


def save_all(folders: dict[str, str]) -> dict[str, Any]:
    return {layout: save_on(layout, folder) for layout, folder in folders.items()}


def load_all(layouts: list[str], folders: list[str]) -> dict[str, Any]:
    return {layout: load_into(trained(layout, 1), folders) for layout in layouts}


def save_and_load_all(layouts: list[str], folders: dict[str, str]) -> tuple[Any, Any]:
    """Engines that have saved go on by a step, and then back: to make others costs seconds."""
    engines = {layout: trained(layout, 2) for layout in layouts}
    saved = {layout: save_of(engine, folders[layout]) for layout, engine in engines.items()}
    for engine in engines.values():
        engine.step(own_share(batches(6)[2], engine.layout))
    every = list(folders.values())
    return saved, {layout: load_into(engine, every) for layout, engine in engines.items()}


def test_ten_layouts_load_what_each_saved(ranks: Any, tmp_path: Path) -> None:
    folders = {layout: str(tmp_path / layout) for layout in LAYOUTS}
    worlds: dict[int, list[str]] = {}
    for layout in LAYOUTS:
        worlds.setdefault(size_of(layout), []).append(layout)
    largest = worlds.pop(max(worlds))
    saved: dict[str, Any] = {}
    for size, layouts in worlds.items():
        own = {layout: folders[layout] for layout in layouts}
        saved |= ranks(save_all, own, world_size=size)[0]
    last, loaded = ranks(save_and_load_all, largest, folders, world_size=size_of(largest[0]))[0]
    saved |= last
    for size, layouts in worlds.items():
        loaded |= ranks(load_all, layouts, list(folders.values()), world_size=size)[0]
    assert sorted(loaded) == sorted(LAYOUTS)
    for layout, states in loaded.items():
        for source, found in zip(folders, states, strict=True):
            assert_equal_to_the_bit(found, saved[source], f"{source} -> {layout}")


def steps_in(folder: Path) -> list[int]:
    return [one.step for one in paceline.checkpoint.Folder(folder).checkpoints()]


def meta_engine(layout: str) -> paceline.Engine:
    with torch.device("meta"):
        model = make_gpt(layers=2)
    return paceline.Engine(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        loss=token_cross_entropy,
        layout=layout,
        precision="fp64",
        clip_norm=0.5,
        init=lambda module: None,
    )


def resume_on_meta(layout: str, folder: str) -> Any:
    engine = meta_engine(layout)
    with paceline.Checkpoints(folder, engine) as checkpoints:
        restored = checkpoints.restore()
        assert restored is not None
        assert engine.steps_done == 2
        engine.step(own_share(batches(6)[2], engine.layout))
    return engine.state_dict()["model"]


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2", "pp=2"])
def test_a_model_without_memory_is_loaded_where_it_is_spread(
    ranks: Any, tmp_path: Path, layout: str
) -> None:
    ranks(save_on, "dp=2", str(tmp_path), world_size=2)
    found = ranks(resume_on_meta, layout, str(tmp_path), world_size=2)[0]

    def go_on(folder: str) -> Any:
        engine = make_engine("dp=2", layers=2)
        with paceline.Checkpoints(folder, engine) as checkpoints:
            checkpoints.restore()
        engine.step(own_share(batches(6)[2], engine.layout))
        return engine.state_dict()["model"]

    wanted = ranks(go_on, str(tmp_path), world_size=2)[0]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


class Ema:
    """Keeps what the engine's parameters are: parts of them, where they are parts."""

    def __init__(self, engine: paceline.Engine) -> None:
        self.values = {n: p.detach().clone() for n, p in engine.model.named_parameters()}

    def state_dict(self) -> Any:
        return {"decay": 0.9, "values": self.values}

    def load_state_dict(self, state: Any) -> None:
        assert state["decay"] == 0.9
        self.values = state["values"]

    def whole(self) -> dict[str, torch.Tensor]:
        return {
            n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in self.values.items()
        }


def keep_an_average(layout: str, folder: str, resume: bool) -> Any:
    engine = trained(layout, 2)
    ema = Ema(engine)
    with paceline.Checkpoints(folder, engine, objects={"ema": ema}) as checkpoints:
        if resume:
            for value in ema.values.values():
                torch.nn.init.zeros_(value)
            checkpoints.restore()
        else:
            checkpoints.save(wait=True)
    return ema.whole()


def test_objects_of_ones_own_move_between_layouts(ranks: Any, tmp_path: Path) -> None:
    where = str(tmp_path)
    saved = ranks(keep_an_average, "dp=2,zero=3", where, False, world_size=2)[0]
    for layout in ("dp=3,zero=2", "dp=1"):
        found = ranks(keep_an_average, layout, where, True, world_size=size_of(layout))[0]
        assert_equal_to_the_bit(found, saved)


def test_another_model_is_named_and_nothing_older_is_tried(tmp_path: Path) -> None:
    engine = trained("dp=1", 1)
    with paceline.Checkpoints(tmp_path, engine) as checkpoints:
        checkpoints.save(wait=True)
    other = nn.Linear(3, 2)
    wrong = paceline.Engine(other, optimizer=torch.optim.SGD, loss=nn.MSELoss())
    before = other.weight.detach().clone()
    with paceline.Checkpoints(tmp_path, wrong) as checkpoints:
        with pytest.raises(CheckpointError, match=r"another model\. it lacks weight, bias; this"):
            checkpoints.restore()
        assert torch.equal(other.weight, before)
    half = paceline.Engine(make_gpt(2), optimizer=torch.optim.AdamW, loss=token_cross_entropy)
    with (
        paceline.Checkpoints(tmp_path, half) as checkpoints,
        pytest.raises(CheckpointError, match="is float64 there and float32 here"),
    ):
        checkpoints.restore()


def test_weights_alone_start_a_run_of_another_dtype(tmp_path: Path) -> None:
    engine = trained("dp=1", 1)
    with paceline.Checkpoints(tmp_path, engine) as checkpoints:
        checkpoints.save(wait=True)
    fresh = paceline.Engine(make_gpt(2), optimizer=torch.optim.AdamW, loss=token_cross_entropy)
    assert paceline.load_weights(fresh, tmp_path).endswith("step-000000001")
    assert fresh.steps_done == 0
    for name, value in engine.model.state_dict().items():
        assert torch.equal(fresh.model.state_dict()[name], value.float())
    with pytest.raises(CheckpointError, match="does not exist"):
        paceline.load_weights(fresh, tmp_path / "nowhere")


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    engine = trained("dp=1", 1)
    with (
        paceline.Checkpoints(tmp_path, engine),
        pytest.raises(CheckpointError, match=f"process {os.getpid()}"),
    ):
        paceline.Checkpoints(tmp_path, engine)


def small(run_dir: Path, **options: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return paceline.Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.CrossEntropyLoss(),
        run_dir=run_dir,
        global_batch=4,
        progress=False,
        checkpoint=paceline.Checkpointing(**options),
    )


def data() -> TensorDataset:
    return TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))


def test_when_to_save_and_what_to_keep(tmp_path: Path) -> None:
    small(tmp_path / "epochs", every_epoch=True, keep=9).fit(data(), epochs=3)
    assert steps_in(tmp_path / "epochs" / "checkpoints") == [4, 8, 12]
    small(tmp_path / "second", every_epochs=2, keep=9, save_at_end=False).fit(data(), epochs=5)
    assert steps_in(tmp_path / "second" / "checkpoints") == [8, 16]
    with pytest.raises(TrainingError, match="every_epoch=True is every_epochs=1, and every_epochs"):
        paceline.Checkpointing(every_epoch=True, every_epochs=2)
    small(tmp_path / "minutes", every_minutes=1e-9, keep=9).fit(data(), steps=3)
    assert steps_in(tmp_path / "minutes" / "checkpoints") == [1, 2, 3]
    small(tmp_path / "some", every=1, keep=2, keep_every=4).fit(data(), steps=11)
    assert steps_in(tmp_path / "some" / "checkpoints") == [4, 8, 10, 11]


def test_elsewhere_than_in_the_run_folder(tmp_path: Path) -> None:
    where = str(tmp_path / "elsewhere")
    small(tmp_path / "run", where=where).fit(data(), steps=2)
    assert steps_in(tmp_path / "elsewhere") == [2]
    history = small(tmp_path / "run", where=where).fit(data(), steps=3, resume=True)
    assert [step.step for step in history.steps] == [1, 2, 3]


class Breaks(paceline.Callback):
    """Holds at one step what no checkpoint can."""

    def __init__(self, at: int) -> None:
        self.at, self.state = at, {}

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.state = {"bad": object()} if trainer.step == self.at else {}

    def state_dict(self) -> dict[str, Any]:
        return self.state


def test_a_failed_save_is_an_event_a_warning_and_no_end(tmp_path: Path) -> None:
    run = small(tmp_path, every=1, keep=9)
    run.callbacks = [Breaks(2)]
    with pytest.warns(UserWarning, match=r"step 2: NOT saved: .*'callbacks'"):
        history = run.fit(data(), steps=4)
    assert history.reason == "done"
    assert steps_in(tmp_path / "checkpoints") == [1, 3, 4]
    found = [e for e in events.read(tmp_path) if isinstance(e, events.CheckpointFailed)]
    assert [(e.step, e.reason) for e in found] == [(2, "every")]


@pytest.mark.filterwarnings("ignore:step 2. NOT saved")
def test_a_failed_save_can_end_the_run(tmp_path: Path) -> None:
    run = small(tmp_path, every=1, on_failure="stop", asynchronous=False)
    run.callbacks = [Breaks(2)]
    with pytest.raises(CheckpointError, match="callbacks"):
        run.fit(data(), steps=9)
    assert run.step == 2
    assert steps_in(tmp_path / "checkpoints") == [1]


WRONG = {
    "minutes": (
        lambda: paceline.Checkpointing(every_minutes=0),
        "Checkpointing: every_minutes=0 must be above 0.",
    ),
    "failure": (
        lambda: paceline.Checkpointing(on_failure="ignore"),
        "Checkpointing: on_failure='ignore' must be one of warn, stop.",
    ),
    "memory": (
        lambda: paceline.Checkpointing(memory_every=0),
        "Checkpointing: memory_every=0 must be a whole number, 1 or more.",
    ),
    "object": (
        lambda: paceline.Checkpoints("never", trained("dp=1", 0), objects={"x": 3}),
        "objects: 'x' is a int without state_dict(), so it cannot be saved.",
    ),
    "name": (
        lambda: paceline.Checkpoints("never", trained("dp=1", 0), objects={"a/b": Breaks(1)}),
        "objects: 'a/b' must be a name without a slash.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(TrainingError) as caught:
        call()
    assert str(caught.value) == message
