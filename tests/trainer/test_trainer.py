"""Training runs: the same at any world size, after any interruption, with metrics that add up."""

from __future__ import annotations

import itertools
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline import events
from paceline.errors import CheckpointError, DataError, LaunchError, TrainingError

N = 23  # with global batches of 6: three full ones and a short one of 5


def dataset(n: int = N) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Noisy(nn.Module):
    """Dropout, batch statistics and an unused parameter: everything that makes resuming hard."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2)
        )
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def trainer(run_dir: Path | None = None, **options: Any) -> paceline.Trainer:
    model = options.pop("model", None) or Noisy()
    return paceline.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        global_batch=6,
        run_dir=run_dir,
        progress=False,
        **options,
    )


class StopAt(paceline.Callback):
    """Asks for a stop at a step, from one rank only."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank

    def on_step_end(self, trainer: paceline.Trainer, result: Any) -> None:
        if trainer.step == self.step and trainer.engine.world.rank == self.rank:
            trainer.stop()


EVERYTHING = dict(
    precision="fp16",
    microbatch=1,
    clip_norm=1.0,
    sync_batchnorm=True,
    schedule=lambda step: 1 / (1 + step),
    seed=3,
)


def run_to_the_end(run_dir: Path, data: paceline.DataOptions) -> Any:
    run = trainer(run_dir, data=data, **EVERYTHING)
    history = run.fit(dataset(), dataset(7), steps=10)
    return history.losses, history.metric("loss"), run.model.state_dict()


def run_with_a_stop(run_dir: Path, stop: int, data: paceline.DataOptions) -> Any:
    first = trainer(run_dir, callbacks=[StopAt(stop, rank=1)], data=data, **EVERYTHING)
    assert first.fit(dataset(), dataset(7), steps=10).reason == "stopped"
    torch.manual_seed(999)  # whatever the new process has done before
    second = trainer(run_dir, callbacks=[StopAt(-1)], data=data, **EVERYTHING)
    history = second.fit(dataset(), dataset(7), steps=10, resume=True)
    return history.losses, history.metric("loss"), second.model.state_dict()


@pytest.mark.world(3)
def test_interrupted_at_any_step_and_resumed_is_equal_to_the_bit(
    ranks: Any, tmp_path: Path
) -> None:
    data = paceline.DataOptions()
    whole = ranks(run_to_the_end, tmp_path / "whole", data)[0]
    for stop in range(1, 10):
        resumed = ranks(run_with_a_stop, tmp_path / str(stop), stop, data)[0]
        assert resumed[0] == whole[0], stop
        for key, value in whole[2].items():
            assert torch.equal(value, resumed[2][key]), (stop, key)


@pytest.mark.world(2)
def test_resume_to_the_bit_with_loader_workers(ranks: Any, tmp_path: Path) -> None:
    data = paceline.DataOptions(workers=2)
    whole = ranks(run_to_the_end, tmp_path / "whole", data)[0]
    resumed = ranks(run_with_a_stop, tmp_path / "stopped", 6, data)[0]
    assert resumed[0] == whole[0]
    # The reading processes do not change the data, either.
    assert ranks(run_to_the_end, tmp_path / "none", paceline.DataOptions())[0][0] == whole[0]


def plain_run(steps: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    data = dataset()
    data = TensorDataset(data.tensors[0].double(), data.tensors[1])
    run = trainer(model=model, **options)
    history = run.fit(data, data, steps=steps)
    return history.losses, history.metric("loss")


def test_any_number_of_ranks_gives_the_same_run(ranks: Any) -> None:
    alone = plain_run(9)
    for size in (2, 3, 4):
        for losses, metrics in ranks(plain_run, 9, world_size=size):
            assert losses == pytest.approx(alone[0], rel=1e-10)
            assert metrics == pytest.approx(alone[1], rel=1e-10)


def rescaled(run_dir: Path, steps: int, resume: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    data = dataset()
    data = TensorDataset(data.tensors[0].double(), data.tensors[1])
    run = trainer(run_dir, model=model)
    return run.fit(data, steps=steps, resume=resume).losses


def test_resume_on_another_number_of_ranks_goes_on_with_the_same_data(
    ranks: Any, tmp_path: Path
) -> None:
    expected = ranks(rescaled, tmp_path / "fixed", 10, False, world_size=4)[0]
    for size, steps in ((4, 3), (3, 6), (1, 8), (4, 10)):
        losses = ranks(rescaled, tmp_path / "moved", steps, size != 4 or steps == 10,
                       world_size=size)[0]  # fmt: skip
    # The history is read back from the events: all ten steps, over four worlds.
    assert losses == pytest.approx(expected, rel=1e-9)


def accuracy(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out.argmax(1) == target).float().mean()


@pytest.mark.world(1, 3)
def test_metrics_are_those_of_the_whole_set_however_it_is_cut(ranks: Any) -> None:
    def job() -> Any:
        model = Noisy()
        run = trainer(
            model=model,
            metrics={
                "accuracy": accuracy,
                "pair": lambda out, t: ((out.argmax(1) == t).sum(), len(t)),
                "order": paceline.WholeSet(lambda out, t: (t * torch.arange(len(t))).sum()),
            },
        )
        history = run.fit(dataset(), dataset(), steps=2)
        model.eval()
        x, y = dataset().tensors
        with torch.no_grad():
            out = model(x)
        expected = {
            "loss": float(F.cross_entropy(out, y)),
            "accuracy": float(accuracy(out, y)),
            "pair": float(accuracy(out, y)),
            "order": float((y * torch.arange(N)).sum()),
        }
        return history.evals[-1].metrics, expected, history.evals[-1].samples

    for metrics, expected, samples in ranks(job):
        assert metrics == pytest.approx(expected, rel=1e-5)  # float32 means of float32 values
        assert samples == N


def saved_steps(run_dir: Path) -> list[int]:
    folder = paceline.checkpoint.Folder(run_dir / "checkpoints")
    assert not folder.unfinished()
    return [checkpoint.step for checkpoint in folder.checkpoints()]


class Record(paceline.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_fit_start(self, trainer: Any) -> None:
        self.calls.append("start")

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.calls.append(f"step {trainer.step}")

    def on_evaluate(self, trainer: Any, metrics: Any) -> None:
        self.calls.append("evaluate")

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        self.calls.append(f"epoch {epoch}")

    def on_checkpoint(self, trainer: Any, path: Path) -> None:
        self.calls.append(f"checkpoint {path.name}")

    def on_fit_end(self, trainer: Any, history: Any) -> None:
        self.calls.append("end")


def test_callbacks_are_called_in_order(tmp_path: Path) -> None:
    record = Record()
    options = paceline.Checkpointing(every=3, keep=1, asynchronous=False)
    run = trainer(tmp_path, callbacks=[record], checkpoint=options)
    run.fit(dataset(12), dataset(5), epochs=2)
    assert record.calls == [
        "start", "step 1", "step 2", "epoch 0", "evaluate",
        "step 3", "checkpoint step-000000003", "step 4", "epoch 1", "evaluate",
        "checkpoint step-000000004", "end",
    ]  # fmt: skip
    assert saved_steps(tmp_path) == [4]


@pytest.mark.world(2)
def test_early_stopping_ends_all_ranks_at_the_same_step(ranks: Any) -> None:
    def job() -> Any:
        values = itertools.chain([1.0, 0.5], itertools.repeat(0.7))
        run = trainer(
            metrics={"made_up": paceline.WholeSet(lambda out, t: next(values))},
            callbacks=[paceline.EarlyStopping("made_up", patience=2, mode="min")],
            evaluation=paceline.Evaluation(every=2),
        )
        history = run.fit(dataset(), dataset(), steps=100)
        return history.reason, len(history.steps)

    assert ranks(job) == [("stopped", 8)] * 2


def test_best_checkpoint_is_the_one_with_the_best_metric(tmp_path: Path) -> None:
    values = iter([0.3, 0.9, 0.5])
    run = trainer(
        tmp_path,
        metrics={"score": paceline.WholeSet(lambda out, t: next(values))},
        evaluation=paceline.Evaluation(every=2),
        checkpoint=paceline.Checkpointing(best="score", mode="max", keep=1),
    )
    run.fit(dataset(), dataset(), steps=6)
    found = paceline.checkpoint.Folder(tmp_path / "checkpoints").checkpoints()
    scores = {one.step: one.manifest.info["metrics"].get("score") for one in found}
    assert scores == {4: 0.9, 6: 0.5}
    folder = paceline.checkpoint.Folder(tmp_path / "checkpoints")
    for best in (folder.best("score", "max"), folder.best("score"), folder.best()):
        assert best is not None
        assert best.step == 4
    worst = folder.best("score", "min")
    assert worst is not None
    assert worst.step == 6


def test_history_has_steps_epochs_time_and_throughput() -> None:
    history = trainer().fit(dataset(), dataset(), epochs=2)
    assert [step.step for step in history.steps] == list(range(1, 9))
    assert [step.samples for step in history.steps] == [6, 6, 6, 5] * 2
    assert history.samples == 2 * N
    assert len(history.epochs) == len(history.evals) == 2
    first = [step for step in history.steps if step.epoch == 0]
    mean = sum(step.loss * step.samples for step in first) / N
    assert history.epochs[0].loss == pytest.approx(mean)
    assert history.reason == "done"
    assert 0 < sum(step.seconds for step in history.steps) < history.seconds
    assert history.samples_per_second > 0
    assert "done at step 8" in repr(history)


def test_events_on_disk_tell_the_same_story(tmp_path: Path) -> None:
    history = trainer(tmp_path).fit(dataset(), dataset(), epochs=1)
    assert paceline.History.read(tmp_path).losses == history.losses
    kinds = [type(event).__name__ for event in events.read(tmp_path)]
    assert kinds == [
        "RunStarted", "StepDone", "StepDone", "StepDone", "StepDone", "EpochDone",
        "PhaseProgress", "EvalDone", "PhaseProgress", "CheckpointSaved", "RunFinished",
    ]  # fmt: skip


class Counting(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        for i in range(self.n):
            yield torch.full((4,), i / 13), i % 2


def test_other_kinds_of_data() -> None:
    assert trainer().fit(Counting(14), epochs=2).samples == 28
    loaders = DataLoader(dataset(), batch_size=6), DataLoader(dataset(), batch_size=6, shuffle=True)
    for given in loaders:
        run = trainer()
        run.global_batch = None
        assert run.fit(given, epochs=1).samples == N


def test_trained_model_comes_back_in_training_mode_as_it_was() -> None:
    model = Noisy()
    model.body[1].eval()  # a frozen norm stays frozen
    trainer(model=model).fit(dataset(), dataset(), steps=3)
    assert model.training
    assert not model.body[1].training


def test_second_fit_starts_a_new_run_on_the_same_weights() -> None:
    run = trainer(schedule=lambda step: 0.5**step)
    first = run.fit(dataset(), steps=4)
    second = run.fit(dataset(), steps=4)
    assert [s.step for s in second.steps] == [1, 2, 3, 4]
    assert [s.lr for s in second.steps] == [s.lr for s in first.steps]


def test_ctrl_c_in_a_script_saves_and_raises(tmp_path: Path) -> None:
    class PressCtrlC(paceline.Callback):
        def on_step_end(self, trainer: Any, result: Any) -> None:
            if trainer.step == 3:
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callbacks=[PressCtrlC()]).fit(dataset(), dataset(), steps=9)
    assert signal.getsignal(signal.SIGINT) is before
    assert saved_steps(tmp_path) == [3]
    assert paceline.History.read(tmp_path).reason == "interrupted"
    history = trainer(tmp_path, callbacks=[paceline.Callback()]).fit(
        dataset(), dataset(), steps=9, resume=True
    )
    assert [step.step for step in history.steps] == list(range(1, 10))


@pytest.mark.world(2)
def test_signal_to_one_rank_during_evaluation_ends_all(ranks: Any, tmp_path: Path) -> None:
    def job(run_dir: Path) -> Any:
        def metric(out: torch.Tensor, target: torch.Tensor) -> float:
            if paceline.World.current().rank == 1:
                signal.raise_signal(signal.SIGTERM)
            return 0.0

        run = trainer(run_dir, metrics={"m": metric}, evaluation=paceline.Evaluation(every=2))
        try:
            run.fit(dataset(), dataset(), steps=9)
        except (SystemExit, KeyboardInterrupt) as leaving:
            return type(leaving).__name__, run.step

    assert {step for _, step in ranks(job, tmp_path)} == {2}
    assert saved_steps(tmp_path) == [2]


def test_damaged_newest_checkpoint_is_stepped_over(tmp_path: Path) -> None:
    options = dict(checkpoint=paceline.Checkpointing(every=2, keep=3))
    trainer(tmp_path, **options).fit(dataset(), steps=4)
    [newest] = (tmp_path / "checkpoints" / "step-000000004").glob("*.bin")
    newest.write_bytes(newest.read_bytes()[:500])
    with pytest.warns(UserWarning, match=rf"{newest.name}.* 500"):
        history = trainer(tmp_path, **options).fit(dataset(), steps=5, resume=True)
    assert [step.step for step in history.steps] == [1, 2, 3, 4, 5]


@pytest.mark.world(2)
def test_nan_stops_the_run_with_an_event(ranks: Any, tmp_path: Path) -> None:
    def job(run_dir: Path) -> str:
        data = dataset()
        data.tensors[0][7] = float("nan")
        try:
            trainer(run_dir, sync_batchnorm=True).fit(data, epochs=1)
        except paceline.errors.NonFiniteError as error:
            return str(error)
        return ""

    assert all("the loss is nan" in message for message in ranks(job, tmp_path))
    found = [e for e in events.read(tmp_path) if isinstance(e, events.NonFinite)]
    assert [event.action for event in found] == ["stop"]


WRONG = {
    "neither": (lambda: trainer().fit(dataset()), TrainingError,
        "fit(epochs=None, steps=None): give exactly one of epochs and steps."),
    "both": (lambda: trainer().fit(dataset(), epochs=1, steps=1), TrainingError,
        "fit(epochs=1, steps=1): give exactly one of epochs and steps."),
    "steps": (lambda: trainer().fit(dataset(), steps=0), TrainingError,
        "fit(steps=0): steps must be a whole number, 1 or more."),
    "nproc": (lambda: trainer().fit(dataset(), steps=1, nproc=0), LaunchError,
        "nproc=0 must be a whole number, 1 or more."),
    "resume from nowhere": (lambda: trainer().fit(dataset(), steps=1, resume=True), TrainingError,
        "fit(resume=True) needs a run_dir to resume from."),
    "metric name": (lambda: trainer(metrics={"loss": accuracy}), TrainingError,
        "metrics: the name 'loss' is taken by the loss itself."),
    "metric value": (
        lambda: trainer(metrics={"m": lambda out, t: out}).fit(dataset(), dataset(), steps=1),
        TrainingError,
        "metric 'm' returned Tensor, not one number. Return the mean over the batch's samples, or "
        "a pair (sum, count)."),
    "best": (
        lambda: trainer(Path("never"), checkpoint=paceline.Checkpointing(best="f1", mode="max")).fit(
            dataset(), dataset(), steps=1),
        TrainingError, "Checkpointing(best=) watches the metric 'f1', but the evaluation gave loss."),
    "best without validation": (
        lambda: trainer(Path("never"), checkpoint=paceline.Checkpointing(best="loss")).fit(
            dataset(), steps=1),
        TrainingError,
        "Checkpointing(best='loss') needs validation data: pass val to fit()."),
    "best where": (
        lambda: trainer(checkpoint=paceline.Checkpointing(best="loss")).fit(
            dataset(), dataset(), steps=1),
        TrainingError, "Checkpointing(best='loss') needs a run_dir to save to."),
    "every": (lambda: paceline.Checkpointing(every=0), TrainingError,
        "Checkpointing: every=0 must be a whole number, 1 or more."),
    "mode": (lambda: paceline.Checkpointing(mode="lowest"), TrainingError,
        "Checkpointing: mode='lowest' must be 'min' (smaller is better) or 'max'."),
    "batches": (lambda: paceline.Evaluation(batches=1.5), TrainingError,
        "Evaluation: batches=1.5 must be a whole number, 1 or more."),
    "patience": (lambda: paceline.EarlyStopping(patience=0), TrainingError,
        "EarlyStopping: patience=0 must be 1 or more."),
    "engine before fit": (lambda: trainer().engine, TrainingError,
        "the trainer has no engine before fit() is called."),
    "no global batch": (
        lambda: paceline.Trainer(Noisy(), optimizer=torch.optim.SGD, loss=F.cross_entropy).fit(
            dataset(), steps=1),
        DataError,
        "fit(train=…) got a TensorDataset: pass global_batch= to the Trainer, the samples per "
        "optimizer step over all ranks, or per_device_batch=, those that one rank puts through "
        "the model at once. Where its items are ready batches, wrap it: "
        "torch.utils.data.DataLoader(data, batch_size=None)."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_say_what_and_why(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, kind, message = WRONG[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_a_folder_with_a_run_is_never_written_over(tmp_path: Path) -> None:
    trainer(tmp_path).fit(dataset(), steps=2)
    with pytest.raises(CheckpointError) as caught:
        trainer(tmp_path).fit(dataset(), steps=4)
    assert str(caught.value) == (
        f"{tmp_path}/checkpoints already holds the checkpoints of a run. Pass resume=True to go "
        "on with it, or choose another run_dir."
    )


@pytest.mark.filterwarnings("ignore:step 4. NOT saved")
def test_disk_that_is_full_loses_nothing_that_was_there(tmp_path: Path) -> None:
    trainer(tmp_path).fit(dataset(), steps=2)
    [kept] = (tmp_path / "checkpoints" / "step-000000002").glob("*.bin")
    content = kept.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, before[1]))
    try:
        with pytest.raises(CheckpointError, match="Earlier checkpoints are untouched"):
            trainer(tmp_path).fit(dataset(), steps=4, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept.read_bytes() == content
    assert saved_steps(tmp_path) == [2]


def test_world_of_one_warns_about_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer().fit(dataset(), dataset(), epochs=1)


def test_a_broken_tracker_does_not_harm_the_run(tmp_path: Path) -> None:
    class Broken:
        def __init__(self) -> None:
            self.seen = 0

        def handle(self, event: Any) -> None:
            self.seen += 1
            raise OSError("no space left")

        def close(self) -> None:
            raise AssertionError("never reached")

    broken = Broken()
    assert trainer(tmp_path, trackers=[broken]).fit(dataset(), steps=2).reason == "done"
    assert broken.seen == 1
    notes = [e.message for e in events.read(tmp_path) if isinstance(e, events.Note)]
    assert notes == [
        "Broken stopped recording (OSError: no space left). The run goes on without it."
    ]


def test_early_stopping_and_resuming_from_nothing_are_told(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        metrics={"flat": lambda out, t: 0.25},
        callbacks=[paceline.EarlyStopping("flat", patience=2, mode="min")],
        evaluation=paceline.Evaluation(every=1),
    )
    run.fit(dataset(), dataset(), steps=9, resume=True)
    notes = [e.message for e in events.read(tmp_path) if isinstance(e, events.Note)]
    assert notes == [
        f"{tmp_path}/checkpoints holds no checkpoint: the run starts from the beginning",
        "stopped at step 3: flat has not improved for 2 evaluations (best 0.2500)",
    ]


def test_misspelt_arguments_and_metrics_are_named_at_once() -> None:
    with pytest.raises(
        TrainingError,
        match=r"unknown argument globl_batch\. Did you mean global_batch\?",
    ):
        trainer(globl_batch=3)
    with pytest.raises(TrainingError) as caught:
        trainer(batch_size=3, epochs=2, max_grad_norm=1.0)
    assert "batch_size. The batch of a step over all ranks is global_batch" in str(caught.value)
    assert "epochs. fit takes the length of a run, in epochs or in steps" in str(caught.value)
    assert "max_grad_norm. The bound on the gradient's norm is clip_norm" in str(caught.value)
    with pytest.raises(
        TrainingError,
        match="EarlyStopping watches the metric 'acuracy', but the evaluation gave loss",
    ):
        trainer(callbacks=[paceline.EarlyStopping("acuracy", mode="max")]).fit(
            dataset(), dataset(), steps=1
        )
