"""A signal to one rank: all save and leave together, each with the code that says why."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import events
from paceline.launch.exit_codes import PEER_LEAVES, TOLD_TO_LEAVE
from paceline.trainer.history import History

STEPS = 8


def dataset(n: int = 24) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Signals(paceline.Callback):
    """Sends this rank what it is to get, after a step or during an evaluation."""

    def __init__(self, number: int | None, *, at: int, evaluating: bool = False) -> None:
        self._number, self._at, self._evaluating = number, at, evaluating

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if not self._evaluating:
            self.send(trainer.step)

    def send(self, step: int) -> None:
        if self._number is not None and step == self._at:
            signal.raise_signal(self._number)


def fit(
    run_dir: Path | None,
    signals: dict[int, int] | None = None,
    at: int = 3,
    resume: bool = False,
    in_evaluation: bool = False,
    checkpoint: paceline.Checkpointing | None = None,
    grace: float | None = None,
) -> Any:
    """Train; how this rank left, or its losses where it came to the end."""
    rank = paceline.World.current().rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    sender = Signals((signals or {}).get(rank), at=at, evaluating=in_evaluation)

    def metric(output: torch.Tensor, target: torch.Tensor) -> float:
        if in_evaluation:
            sender.send(trainer.step)
        return 0.0

    trainer = paceline.Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=F.cross_entropy,
        global_batch=4,
        run_dir=run_dir,
        progress=False,
        metrics={"metric": metric},
        evaluation=paceline.Evaluation(every=4),
        checkpoint=checkpoint or paceline.Checkpointing(),
        callbacks=[sender],
    )
    trainer.grace = grace
    try:
        return trainer.fit(dataset(), dataset(16), steps=STEPS, resume=resume).losses
    except SystemExit as left:
        return left.code
    except KeyboardInterrupt:
        return "Ctrl-C"


def notes(run_dir: Path) -> list[str]:
    return [event.message for event in events.read(run_dir) if isinstance(event, events.Note)]


@pytest.mark.world(3)
def test_rank_that_is_told_to_leave_and_those_that_go_with_it(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(fit, tmp_path / "whole")
    codes = ranks(fit, tmp_path / "left", {1: signal.SIGTERM})
    assert codes == [PEER_LEAVES, TOLD_TO_LEAVE, PEER_LEAVES]
    saved = [e for e in events.read(tmp_path / "left") if isinstance(e, events.CheckpointSaved)]
    assert [(e.step, e.reason) for e in saved] == [(3, "stop")]
    # What is left is whole: the run goes on from it, to the bit, and its history is one run's.
    assert ranks(fit, tmp_path / "left", None, 0, True) == whole
    history = History.read(tmp_path / "left")
    assert [step.step for step in history.steps] == list(range(1, STEPS + 1))
    assert history.losses == whole[0]
    assert history.reason == "done"


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("signals", "codes"),
    [
        ({0: signal.SIGTERM, 1: signal.SIGTERM}, [TOLD_TO_LEAVE, TOLD_TO_LEAVE]),
        ({0: signal.SIGTERM}, [TOLD_TO_LEAVE, PEER_LEAVES]),
        ({1: signal.SIGINT}, ["Ctrl-C", "Ctrl-C"]),  # a person ends the run: nobody goes on
        ({0: signal.SIGINT, 1: signal.SIGTERM}, ["Ctrl-C", "Ctrl-C"]),
    ],
)
def test_all_agree_on_why_they_leave(
    ranks: Any, tmp_path: Path, signals: dict[int, int], codes: list[Any]
) -> None:
    assert ranks(fit, tmp_path, signals) == codes
    [finished] = [e for e in events.read(tmp_path) if isinstance(e, events.RunFinished)]
    assert (finished.reason, finished.step) == ("interrupted", 3)


@pytest.mark.world(2)
def test_evaluation_is_left_half_way_and_done_again(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(fit, tmp_path / "whole")
    codes = ranks(fit, tmp_path / "left", {1: signal.SIGTERM}, 4, False, True)
    assert codes == [PEER_LEAVES, TOLD_TO_LEAVE]
    assert not [e for e in events.read(tmp_path / "left") if isinstance(e, events.EvalDone)]
    assert ranks(fit, tmp_path / "left", None, 0, True) == whole
    done = [e.step for e in events.read(tmp_path / "left") if isinstance(e, events.EvalDone)]
    assert done == [4, 8]


@pytest.mark.world(2)
def test_save_that_is_under_way_is_not_begun_anew(ranks: Any, tmp_path: Path) -> None:
    every = paceline.Checkpointing(every=1)
    codes = ranks(fit, tmp_path, {0: signal.SIGTERM}, 3, False, False, every)
    assert codes == [TOLD_TO_LEAVE, PEER_LEAVES]
    saved = [e for e in events.read(tmp_path) if isinstance(e, events.CheckpointSaved)]
    assert [(e.step, e.reason) for e in saved] == [(1, "every"), (2, "every"), (3, "every")]


@pytest.mark.world(2)
def test_says_so_where_the_time_may_not_be_enough(ranks: Any, tmp_path: Path) -> None:
    def leave(name: str, grace: float, memory_every: int | None = None) -> list[str]:
        saving = paceline.Checkpointing(every=2, memory_every=memory_every)
        ranks(fit, tmp_path / name, {0: signal.SIGTERM}, 3, False, False, saving, grace)
        return notes(tmp_path / name)

    [told] = leave("short", 1e-3)
    assert told.startswith("step 3 is being saved, but that took up to ")
    assert told.endswith("of the 0 s before the ranks are ended 0 are left")
    [told] = leave("memory", 1e-3, memory_every=2)
    assert told.endswith("are left; a copy is in memory")
    assert leave("long", 600.0) == []


def test_restart_that_has_nothing_to_go_on_from_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(paceline.World.current(), "restart_count", 1)
    seen: list[events.Event] = []

    class Listens(paceline.Callback):
        """Looks at what the run told before it began."""

        def on_fit_start(self, trainer: Any) -> None:
            trainer.stop("seen enough")

    class Keeps:
        def handle(self, event: events.Event) -> None:
            seen.append(event)

        def close(self) -> None: ...

    for run_dir in (None, tmp_path):
        seen.clear()
        model = nn.Linear(4, 2)
        trainer = paceline.Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=F.cross_entropy,
            global_batch=4,
            run_dir=run_dir,
            progress=False,
            trackers=[Keeps()],
            callbacks=[Listens()],
        )
        trainer.fit(dataset(), steps=1)
        told = [e.message for e in seen if isinstance(e, events.Note)]
        assert any("the run starts from the beginning" in message for message in told), run_dir
