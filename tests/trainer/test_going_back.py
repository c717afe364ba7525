"""Going on from an earlier checkpoint: exact, nothing lost, and never back to what came later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import events
from paceline.checkpoint import going_back
from paceline.checkpoint.folder import Folder
from paceline.errors import CheckpointError, TrainingError
from paceline.testing.plugin import Ranks
from paceline.track.summary import Summary


def dataset(n: int = 24) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def trainer(run_dir: Path | None, **options: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    return paceline.Trainer(
        model,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        run_dir=run_dir,
        progress=False,
        global_batch=4,
        **{"checkpoint": paceline.Checkpointing(every=2, keep=9), **options},
    )


def steps_in(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted(folder.glob("step-*"))]


def weights(made: paceline.Trainer) -> list[torch.Tensor]:
    return [value.clone() for value in made.model.state_dict().values()]


def test_a_run_that_went_back_trains_as_if_it_had_never_been_further(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    straight = first.fit(dataset(), steps=8)
    second = trainer(tmp_path)
    history = second.fit(dataset(), steps=6, resume=4)
    saved = tmp_path / "checkpoints"
    assert steps_in(saved) == [2, 4, 6]
    assert steps_in(saved / "set-aside-1") == [6, 8]
    assert history.losses == straight.losses[:6]
    assert paceline.History.read(tmp_path).losses == history.losses
    notes = [e.message for e in events.read(tmp_path) if isinstance(e, events.Note)]
    assert notes == [
        f"went back to step 4: the checkpoints of later steps are in {saved}/set-aside-1 now; "
        "delete it to make room"
    ]
    # It goes on from there, to the bit, and the checkpoints that were set aside can still be used.
    third = trainer(tmp_path)
    third.fit(dataset(), steps=8, resume=True)
    assert all(map(torch.equal, weights(third), weights(first)))
    other = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    paceline.load_weights(other, saved / "set-aside-1", which=8)
    assert all(map(torch.equal, other.state_dict().values(), weights(first)))
    # A second time they go to a folder of their own.
    trainer(tmp_path).fit(dataset(), steps=3, resume=2)
    assert steps_in(saved / "set-aside-2") == [4, 6, 8]
    assert steps_in(saved) == [2, 3]


def test_the_best_is_gone_back_to_by_the_runs_own_metric(tmp_path: Path) -> None:
    losses = iter([0.5, 0.1, 0.7, 0.9, 0.2, 0.3])
    options = {
        "checkpoint": paceline.Checkpointing(every=2, keep=9, best="made_up", mode="min"),
        "evaluation": paceline.Evaluation(every=2),
        "metrics": {"made_up": paceline.WholeSet(lambda output, target: next(losses))},
    }
    trainer(tmp_path, **options).fit(dataset(), dataset(), steps=8)
    history = trainer(tmp_path, **options).fit(dataset(), dataset(), steps=6, resume="best")
    assert [step.step for step in history.steps] == [1, 2, 3, 4, 5, 6]
    assert [e.metrics["made_up"] for e in history.evals] == [0.5, 0.1, 0.2]
    assert steps_in(tmp_path / "checkpoints") == [2, 4, 6]


@pytest.mark.filterwarnings("ignore:cannot resume from checkpoint, step 2")
@pytest.mark.parametrize("resume", ["best", 3, 99, True])
def test_what_cannot_be_gone_back_to_changes_nothing(tmp_path: Path, resume: Any) -> None:
    trainer(tmp_path).fit(dataset(), steps=4)
    if resume is True:
        [data] = (tmp_path / "checkpoints" / "step-000000002").glob("*.bin")
        data.write_bytes(b"damaged")
        resume, match = 2, "is damaged.*nothing was changed"
    elif resume == "best":
        match = "was not told by which metric a checkpoint is the best"
    else:
        match = f"holds no checkpoint of step {resume}; it has steps 2, 4"
    with pytest.raises(CheckpointError, match=match):
        trainer(tmp_path).fit(dataset(), steps=6, resume=resume)
    assert steps_in(tmp_path / "checkpoints") == [2, 4]
    assert not (tmp_path / "checkpoints" / "set-aside-1").exists()


def on_each_rank(folder: Path) -> list[float]:
    options: dict[str, Any] = {"layout": "dp=2,zero=2"}
    straight = trainer(folder, **options).fit(dataset(), steps=6)
    history = trainer(folder, **options).fit(dataset(), steps=6, resume=2)
    assert history.losses == straight.losses
    return history.losses


@pytest.mark.world(2)
def test_all_ranks_go_back_together(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(on_each_rank, tmp_path)
    assert first == second
    assert steps_in(tmp_path / "checkpoints" / "set-aside-1") == [4, 6]


@pytest.mark.parametrize("resume", ["bset", -1, 1.5, ()])
def test_resume_takes_a_checkpoint_or_a_truth_value(tmp_path: Path, resume: Any) -> None:
    with pytest.raises(TrainingError, match="it is True, 'best', 'last' or the number of a step"):
        trainer(tmp_path).fit(dataset(), steps=1, resume=resume)
    with pytest.raises(TrainingError, match=r"fit\(resume='best'\) needs a run_dir"):
        trainer(None).fit(dataset(), steps=1, resume="best")


def test_a_death_while_going_back_is_made_good_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path).fit(dataset(), steps=8)

    class Died(BaseException):
        pass

    def die(self: Any, path: str, to: str) -> None:
        if "000000008" in path:
            raise Died
        real(self, path, to)

    kind = type(Folder(tmp_path / "checkpoints").storage)
    real = kind.move
    monkeypatch.setattr(kind, "move", die)
    with pytest.raises(Died):
        trainer(tmp_path).fit(dataset(), steps=8, resume=4)
    monkeypatch.undo()
    saved = tmp_path / "checkpoints"
    assert steps_in(saved) == [2, 4, 8]
    history = trainer(tmp_path).fit(dataset(), steps=5, resume=True)
    assert [step.step for step in history.steps] == [1, 2, 3, 4, 5]
    assert (steps_in(saved), steps_in(saved / "set-aside-1")) == ([2, 4, 5], [6, 8])


def test_a_restart_of_the_same_launch_does_not_go_back_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path).fit(dataset(), steps=4)
    folder = Folder(tmp_path / "checkpoints")
    world = paceline.World.init()
    monkeypatch.setattr(world, "launch_id", "one")
    trainer(tmp_path).fit(dataset(), steps=6, resume=2)
    monkeypatch.setattr(world, "restart_count", 1)
    history = trainer(tmp_path).fit(dataset(), steps=8, resume=2)
    assert steps_in(tmp_path / "checkpoints") == [2, 4, 6, 8]
    assert len(history.steps) == 8
    # A start of that launch that died before it had gone back leaves it to the next one.
    monkeypatch.setattr(world, "launch_id", "two")
    trainer(tmp_path).fit(dataset(), steps=4, resume=2)
    assert steps_in(tmp_path / "checkpoints") == [2, 4]
    assert going_back.last_gone_back(folder) == going_back.GoneBack(2, "set-aside-2", "two", True)


@pytest.mark.parametrize(
    "text", ["{}", "nonsense", '{"step":2,"into":"../x","launch":"","done":false}', "[1,2,3]"]
)
def test_a_record_that_was_tampered_with_is_refused(tmp_path: Path, text: str) -> None:
    trainer(tmp_path).fit(dataset(), steps=4)
    (tmp_path / "checkpoints" / ".went-back").write_text(text)
    with pytest.raises(CheckpointError, match="does not say to which step the run went back"):
        trainer(tmp_path).fit(dataset(), steps=6, resume=True)
    assert steps_in(tmp_path / "checkpoints") == [2, 4]


def test_a_summary_forgets_what_was_saved_after_the_step_gone_back_to(tmp_path: Path) -> None:
    trainer(tmp_path).fit(dataset(), steps=4)
    trainer(tmp_path, checkpoint=paceline.Checkpointing(save_at_end=False)).fit(
        dataset(), steps=3, resume=2
    )
    saved = Summary.read(tmp_path).checkpoint
    assert saved is not None
    assert saved.step == 2
