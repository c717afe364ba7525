"""Metrics, callbacks, early stopping, collate, groups and schedulers: in a config as in Python."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.config import load, load_checked
from paceline.config.fields import OPTIMIZERS, default_lr
from paceline.config.metric_checks import metric_problems
from paceline.config.targets import Callee
from paceline.errors import ConfigError, TrainingError
from paceline.trainer.config_parts import make_optimizer, make_schedule
from paceline.trainer.run import from_config

OWN = '''
import torch
from torch import nn
import paceline

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).relu())

def data(n=21):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    pairs = [(row, int(row.sum() > 0)) for row in x]
    return pairs, pairs[:11]

def collate(samples, scale=1.0):
    return torch.stack([x for x, _ in samples]) * scale, torch.tensor([y for _, y in samples])

def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()

class Share:
    """The share of a class among the targets."""
    def __init__(self, which):
        self.which = which
    def __call__(self, output, target):
        return (target == self.which).sum(), len(target)

def ordered(output, target):
    return (target * torch.arange(len(target))).sum()

class StopAfter(paceline.Callback):
    def __init__(self, step):
        self.step = step
    def on_step_end(self, trainer, result):
        if trainer.step == self.step:
            trainer.stop("far enough")
'''  # fmt: skip
CONFIG: dict[str, Any] = {
    "model": {"target": "own_parts_of_a_run:Net"},
    "loss": {"target": "torch.nn:CrossEntropyLoss"},
    "data": {
        "target": "own_parts_of_a_run:data",
        "collate_fn": {"target": "own_parts_of_a_run:collate", "args": {"scale": 2.0}},
    },
    "metrics": {
        "accuracy": "own_parts_of_a_run:accuracy",
        "ones": {"target": "own_parts_of_a_run:Share", "args": {"which": 1}},
        "order": {"target": "own_parts_of_a_run:ordered", "whole_set": True},
    },
    "optimizer": {
        "lr": 0.05,
        "weight_decay": 0.1,
        "decay": "weights",
        "groups": [{"match": "head.*", "lr": 0.01}],
    },
    "schedule": {"name": "StepLR", "args": {"step_size": 2, "gamma": 0.5}, "warmup_steps": 2},
    "batch": {"global_batch": 5},
    "train": {"steps": 9, "eval_every": 2},
    "early_stopping": {"metric": "order", "mode": "max", "patience": 50},
    "callbacks": [{"target": "own_parts_of_a_run:StopAfter", "args": {"step": 7}}],
    "checkpoint": {"every": 3, "best": "accuracy", "mode": "max"},
    "launch": {"device": "cpu", "timeout": 240.0},
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_parts_of_a_run.py").write_text(OWN)
    return tmp_path / "code"


def by_config(code: Path, run_dir: Path, resume: bool, steps: int, stop_at: int) -> Any:
    config = load(
        {**CONFIG, "code": [str(code)], "train": {"steps": steps, "eval_every": 2}},
        [f"callbacks=[{{target: 'own_parts_of_a_run:StopAfter', args: {{step: {stop_at}}}}}]"],
    )
    history = from_config(config, run_dir, resume=resume)
    return history.losses, [e.metrics for e in history.evals], [e.lr for e in history.steps]


def by_hand(code: Path) -> Any:
    from paceline.config import import_target

    own = {
        name: import_target(f"own_parts_of_a_run:{name}", [str(code)])
        for name in ("Net", "data", "collate", "accuracy", "Share", "ordered", "StopAfter")
    }
    torch.manual_seed(0)
    model = own["Net"]()
    groups = paceline.parameter_groups(model, {"head.*": {"lr": 0.01}}, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
    train, val = own["data"]()
    history = paceline.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        global_batch=5,
        schedule=lambda step: (step + 1) / 2 if step < 2 else 0.5 ** ((step - 2) // 2),
        metrics={
            "accuracy": own["accuracy"],
            "ones": own["Share"](1),
            "order": paceline.WholeSet(own["ordered"]),
        },
        callbacks=[own["StopAfter"](7)],
        data=paceline.DataOptions(collate_fn=lambda samples: own["collate"](samples, scale=2.0)),
        evaluation=paceline.Evaluation(every=2),
        progress=False,
    ).fit(train, val, steps=9)
    return history.losses, [e.metrics for e in history.evals], [e.lr for e in history.steps]


def test_a_config_trains_as_the_same_in_python_and_resumes_exactly(
    ranks: Any, code: Path, tmp_path: Path
) -> None:
    losses, evals, rates = ranks(by_hand, code, world_size=2)[0]
    config = ranks(by_config, code, tmp_path / "whole", False, 9, 7, world_size=2)[0]
    assert (config[0], config[1]) == (losses, evals)
    assert config[2] == pytest.approx(rates, rel=1e-12)
    assert rates == pytest.approx([0.025, 0.05, 0.05, 0.05, 0.025, 0.025, 0.0125])
    assert len(losses) == 7  # stopped by the callback
    assert evals[0]["ones"] == pytest.approx(sum(y for _, y in pairs(code)) / 11)
    assert evals[0]["order"] == sum(i * y for i, (_, y) in enumerate(pairs(code)))
    # In the middle of the scheduler's warmup, and of its steps.
    ranks(by_config, code, tmp_path / "cut", False, 9, 4, world_size=2)
    resumed = ranks(by_config, code, tmp_path / "cut", True, 9, 7, world_size=2)[0]
    assert resumed[0] == config[0]
    assert resumed[2] == config[2]


def pairs(code: Path) -> Any:
    from paceline.config import import_target

    return import_target("own_parts_of_a_run:data", [str(code)])()[1]


def test_early_stopping_by_a_metric_of_the_config(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    stopping = {"metric": "order", "mode": "max", "patience": 2}
    changed = {**CONFIG, "code": [str(code)], "early_stopping": stopping, "callbacks": []}
    # As the world which other tests of this process may have joined.
    launch = {"device": "cpu", "nproc": 1, "timeout": 300.0}
    config = load_checked({**changed, "launch": launch}, devices=0)
    history = from_config(config, tmp_path / "run", resume=False)
    assert [e.step for e in history.evals] == [2, 4, 6]  # the order never changes
    assert history.reason == "stopped"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm((4, 4)))
        self.gain = nn.Parameter(torch.ones(4))
        self.table = nn.Embedding(5, 4)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def names(model: nn.Module, groups: list[dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    known = {id(p): name for name, p in model.named_parameters()}
    return [
        ([known[id(p)] for p in group["params"]], {k: v for k, v in group.items() if k != "params"})
        for group in groups
    ]


def test_weight_decay_by_rule_and_rates_by_pattern() -> None:
    model = Wide()
    assert names(model, paceline.parameter_groups(model, weight_decay=0.1)) == [
        (["body.0.weight", "table.weight"], {"weight_decay": 0.1}),
        (["gain", "body.0.bias", "body.1.weight", "body.1.bias"], {"weight_decay": 0.0}),
    ]
    # The first pattern counts; what it says of weight decay stands, also for a bias.
    rules = {"body.0.*": {"lr": 0.5, "weight_decay": 0.3}, "body.*": {"lr": 0.7}, "gain": {}}
    assert names(model, paceline.parameter_groups(model, rules)) == [
        (["table.weight"], {}),
        (["body.0.weight", "body.0.bias"], {"lr": 0.5, "weight_decay": 0.3}),
        (["body.1.weight", "body.1.bias"], {"lr": 0.7, "weight_decay": 0.0}),
        (["gain"], {"weight_decay": 0.0}),
    ]
    together = paceline.parameter_groups(model, [(["gain", "*.bias"], {"lr": 1.0})], decay="all")
    assert [len(group["params"]) for group in together] == [3, 3]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"haed.*": {}}, r"no parameter matches 'haed\.\*'\. The parameters are gain, body\.0"),
        ({"frozen.*": {}}, r"matches parameters that are frozen only \(frozen\.weight"),
        ({"gain": {"params": []}}, "which parameters they are for is said by the pattern"),
        (["gain"], "'gain' must be a pattern with its settings"),
        ([((), {})], "must be a pattern of names"),
    ],
)
def test_groups_that_mean_nothing_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        paceline.parameter_groups(Wide(), groups)


def test_a_pattern_of_a_config_is_named_with_its_key() -> None:
    config = load({"optimizer": {"groups": [{"match": "haed.*"}]}})
    with pytest.raises(ConfigError, match=r"optimizer\.groups: no parameter matches 'haed"):
        make_optimizer(config, nn.Linear(2, 2))


def rates(schedule: dict[str, Any], steps: int = 8, **more: Any) -> list[float]:
    config = load({"schedule": {"warmup_steps": 0, **schedule}, "train": {"steps": steps}, **more})
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(config, model)
    made = make_schedule(config, [], optimizer)
    engine = paceline.Engine(model, optimizer=optimizer, loss=nn.MSELoss(), schedule=made)
    return [engine.step((torch.ones(1, 2), torch.ones(1, 2))).lr for _ in range(steps)]


def test_schedulers_by_name_get_the_length_of_the_run() -> None:
    lr = {"optimizer": {"name": "sgd", "lr": 1.0, "args": {"momentum": 0.5}}}
    assert rates({"name": "ExponentialLR", "args": {"gamma": 0.5}}, 4, **lr) == [
        1,
        0.5,
        0.25,
        0.125,
    ]
    assert rates({"name": "CosineAnnealingLR"}, 4, **lr)[2] == pytest.approx(0.5)
    warm = rates({"name": "CosineAnnealingLR", "warmup_steps": 4}, 8, **lr)
    assert warm == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.8536, 0.5, 0.1464], abs=1e-4)
    assert max(rates({"name": "OneCycleLR"}, 9, **lr)) == pytest.approx(1.0, rel=0.05)
    # A function from the step to a factor; one that makes a scheduler takes the optimizer.
    own = f"{__name__}:halves"
    assert rates({"name": own, "args": {"every": 2}}, 5, **lr) == [1, 1, 0.5, 0.5, 0.25]
    assert rates({"name": f"{__name__}:thirds"}, 3, **lr) == pytest.approx([1, 1 / 3, 1 / 9])


def halves(step: int, every: int) -> float:
    return 0.5 ** (step // every)


def thirds(optimizer: Any, num_training_steps: int) -> Any:
    assert num_training_steps == 3
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 1 / 3)


def test_a_scheduler_needs_the_length_of_the_run() -> None:
    config = load({"schedule": {"name": "CosineAnnealingLR"}, "train": {"epochs": 2}})
    optimizer = make_optimizer(config, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"schedule\.args\.T_max must say how many steps"):
        make_schedule(config, iter([]), optimizer)
    with pytest.raises(ConfigError, match="goes with its optimizer"):
        make_schedule(config, [1, 2])


def test_rates_without_one_are_torchs() -> None:
    for name, path in OPTIMIZERS.items():
        kind = getattr(torch.optim, path.partition(":")[2])
        assert default_lr(name) == inspect.signature(kind).parameters["lr"].default, name


class Moments(nn.Module):
    """As torchmetrics keeps its state: a sum, a list of tensors, a number averaged over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._reductions = {
            "total": lambda values: values.sum(0),
            "rows": torch.cat,
            "mean": lambda values: values.mean(0),
            "texts": None,
        }
        self.device = torch.device("cpu")
        self.distributed_available_fn = torch.distributed.is_initialized
        self.reset()

    def reset(self) -> None:
        self.total, self.rows, self.texts = torch.zeros(()), [], []
        self.mean = torch.zeros(())

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.total = self.total + target.sum()
        self.rows.append(target.long())
        self.texts += [str(int(value)) for value in target]
        self.mean = torch.ones(())

    def compute(self) -> dict[str, torch.Tensor]:
        rows = self.rows if isinstance(self.rows, torch.Tensor) else torch.cat(self.rows)
        assert len(self.texts) == len(rows)
        assert not self.distributed_available_fn() or torch.distributed.get_world_size() == 1
        return {"total": self.total, "rows": rows.sum(), "count": len(rows), "mean": self.mean}


def stateful(layout: str, real: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 2, 0, 1, 1, 2])
    metrics: dict[str, Any] = {"own": Moments()}
    if real:
        import torchmetrics as tm

        kinds = {"task": "multiclass", "num_classes": 3}
        metrics["f1"] = tm.F1Score(**kinds, average="macro")
        metrics["auc"] = tm.AUROC(**kinds)
        metrics["all"] = tm.MetricCollection([tm.Accuracy(**kinds), tm.Recall(**kinds)])
        metrics["class"] = tm.ClasswiseWrapper(tm.Precision(**kinds, average=None))
    trainer = paceline.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        # One rank of three has no sample in the last batch.
        global_batch=5,
        layout=layout,
        metrics=metrics,
        precision="fp64",
        progress=False,
    )
    history = trainer.fit(TensorDataset(x, y), TensorDataset(x, y), epochs=2)
    return [evaluation.metrics for evaluation in history.evals]


HAS_TORCHMETRICS = importlib.util.find_spec("torchmetrics") is not None


def test_metrics_with_a_state_are_those_of_one_process(ranks: Any) -> None:
    """With torchmetrics 1.9, where it is installed."""
    (alone,) = ranks(stateful, "dp=1", HAS_TORCHMETRICS, world_size=1)
    assert len(alone) == 2
    assert alone[0] == alone[1]  # the state begins anew
    assert {k: v for k, v in alone[0].items() if k.startswith("own")} == {
        "own/total": 7,
        "own/rows": 7,
        "own/count": 7,
        "own/mean": 1,
    }
    for size, layout in ((3, "dp=3"), (2, "tp=2"), (2, "pp=2")):
        every = ranks(stateful, layout, HAS_TORCHMETRICS, world_size=size)
        for found in every:
            assert found == every[0]
            for mine, theirs in zip(found, alone, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-6)


def test_one_value_of_a_metric_with_several_can_be_watched(tmp_path: Path) -> None:
    def fit(watched: str) -> paceline.History:
        model = nn.Linear(2, 3)
        x, y = torch.randn(6, 2), torch.arange(6) % 3
        return paceline.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            global_batch=6,
            run_dir=tmp_path / watched.replace("/", "-"),
            metrics={"own": Moments()},
            callbacks=[paceline.EarlyStopping(watched, mode="max", patience=1)],
            checkpoint=paceline.Checkpointing(best=watched, mode="max"),
            progress=False,
        ).fit(TensorDataset(x, y), TensorDataset(x, y), epochs=9)

    history = fit("own/total")
    assert (history.reason, len(history.evals)) == ("stopped", 2)
    with pytest.raises(TrainingError, match=r"watches the metric 'own/totl', but the .* own/total"):
        fit("own/totl")
    with pytest.raises(TrainingError, match="watches the metric 'other/total'"):
        fit("other/total")
    problems = load({"metrics": {"m": "a:b"}, "early_stopping": {"metric": "m/x", "mode": "max"}})
    found = [text for _, text in metric_problems(problems, Callee("function"))]
    assert not any("is not measured" in text for text in found)


def test_a_state_that_nobody_can_put_together_is_refused(ranks: Any) -> None:
    def job() -> str:
        from paceline.trainer.stateful_metrics import StatefulMetric

        metric = Moments()
        del metric._reductions
        with pytest.raises(TrainingError, match=r"Derive it from torchmetrics\.Metric") as refused:
            StatefulMetric("mine", metric).compute(0, 2)
        return str(refused.value)

    assert "'mine' (Moments)" in job()


def test_what_is_no_number_is_named() -> None:
    from paceline.trainer.stateful_metrics import StatefulMetric

    class Several(Moments):
        def compute(self) -> Any:
            return torch.ones(3)

        def update(self, output: Any, target: Any) -> None:
            raise ValueError("preds must be of shape (N, C)")

    metric = StatefulMetric("several", Several())
    with pytest.raises(TrainingError, match="'several' gave 3 values, not one"):
        metric.compute(0, 1)
    with pytest.raises(TrainingError, match=r"cannot take the model's output.*preds must be"):
        metric.update(torch.ones(2), torch.ones(2))
