"""Models, losses, batches and optimizers off the beaten track, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import paceline
from paceline.errors import CheckpointError, DataError, LossError, TrainingError


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def samples(n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=g)


def sgd(model: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def my_slice(batch: Any) -> Any:
    world = paceline.World.current()
    start, stop = paceline.data.share(len(batch[0]), world.rank, world.size)
    return tuple(t[start:stop] for t in batch)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("unfreeze", [True, False])
@pytest.mark.world(2)
def test_parameters_frozen_or_unfrozen_on_the_way(ranks: Any, unfreeze: bool) -> None:
    def run(step: Callable[[nn.Module, int], None], model: nn.Sequential) -> dict[str, Any]:
        model[0].requires_grad_(not unfreeze)
        for index in range(4):
            if index == 2:
                model[0].requires_grad_(unfreeze)
            step(model, index)
        return model.state_dict()

    def job() -> dict[str, Any]:
        model = two_layers()
        model[0].requires_grad_(not unfreeze)
        engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=sgd(model))
        return run(lambda model, index: engine.step(my_slice(samples())), model)

    model = two_layers()
    optimizer = sgd(model)

    def plain(model: nn.Module, index: int) -> None:
        optimizer.zero_grad()
        x, y = samples()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    expected = run(plain, model)
    for state in ranks(job):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"microbatch": 2}, {"clip_norm": 0.1, "clip_value": 0.01}])
@pytest.mark.world(3)
def test_sparse_embedding_trains_like_a_dense_one(ranks: Any, options: dict[str, Any]) -> None:
    def job(sparse: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(6, 4, sparse=sparse), nn.Linear(4, 3)).double()
        engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=sgd(model), **options)
        words = torch.tensor([[1, 2], [3, 1], [2, 2], [0, 5], [5, 5], [1, 1], [3, 4]])
        norms = [engine.step(my_slice((words, samples()[1]))).grad_norm for _ in range(3)]
        return norms, model.state_dict()

    # Rounding of float64 sums taken in another order.
    torch.testing.assert_close(ranks(job, True), ranks(job, False), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_outside_the_optimizer_do_not_count(precision: str) -> None:
    def norms(train_all: bool) -> list[float | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        model[0].requires_grad_(train_all)
        engine = paceline.Engine(
            model,
            loss=F.cross_entropy,
            optimizer=sgd(model[1], 0.1),
            clip_norm=1.0,
            precision=precision,
        )
        x, y = samples()
        return [engine.step((x.float(), y)).grad_norm for _ in range(3)]

    assert norms(True) == norms(False)


def test_step_after_a_failed_one_starts_clean() -> None:
    def run(fail: bool) -> torch.Tensor:
        calls = iter([1, 0] if fail else [0])
        model = linear()

        def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if len(target) == 3 and next(calls):  # the second microbatch
                raise ZeroDivisionError
            return F.cross_entropy(out, target)

        engine = paceline.Engine(model, loss=loss, optimizer=sgd(model), microbatch=4)
        if fail:
            with pytest.raises(ZeroDivisionError):
                engine.step(samples())
        engine.step(samples())
        return model.weight

    assert torch.equal(run(fail=True), run(fail=False))


@pytest.mark.world(2)
def test_norm_with_two_names_is_synchronised_under_both(ranks: Any) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 3)).double()

    def job() -> Any:
        model = net()
        engine = paceline.Engine(
            model, loss=F.cross_entropy, optimizer=sgd(model), sync_batchnorm=True
        )
        engine.step(my_slice(samples()))
        return model.state_dict()

    model = net()
    optimizer = sgd(model)
    x, y = samples()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for state in ranks(job):
        torch.testing.assert_close(state, model.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["pair with logits", "triple", "one element"])
def test_model_whose_output_starts_with_the_loss(form: str) -> None:
    class Model(nn.Linear):
        def forward(self, input: torch.Tensor, target: torch.Tensor) -> Any:  # type: ignore[override]
            out = super().forward(input)
            loss = F.cross_entropy(out, target)
            return {
                "pair with logits": (loss, out),
                "triple": (loss, out, input),
                "one element": loss.reshape(1),
            }[form]

    torch.manual_seed(0)
    model = Model(4, 3).double()
    x, y = samples()
    expected = F.cross_entropy(linear()(x), y).item()
    engine = paceline.Engine(model, optimizer=sgd(model))
    assert engine.step((x, y)).loss == pytest.approx(expected, rel=1e-12)


def test_class_weights_follow_the_precision() -> None:
    x, y = samples()
    weights = torch.tensor([0.1, 0.2, 0.3])
    model = linear().float()
    engine = paceline.Engine(
        model, loss=nn.CrossEntropyLoss(weight=weights), optimizer=sgd(model), precision="fp64"
    )
    reference = F.cross_entropy(linear().float().double()(x), y, weight=weights.double())
    assert engine.step((x, y)).loss == pytest.approx(reference.item(), rel=1e-12)


def test_mean_over_the_batch_of_a_divergence() -> None:
    model = linear()
    x, _ = samples()
    target = torch.full((7, 3), 1 / 3, dtype=torch.float64)
    loss = nn.KLDivLoss(reduction="batchmean")
    engine = paceline.Engine(
        nn.Sequential(model, nn.LogSoftmax(1)), loss=loss, optimizer=sgd(model), microbatch=3
    )
    expected = loss(linear()(x).log_softmax(1), target).item()
    assert engine.step((x, target)).loss == pytest.approx(expected, rel=1e-12)


@dataclass
class Bag:
    x: torch.Tensor
    y: torch.Tensor
    names: Any


@pytest.mark.parametrize(
    "names", [["a", "b", "c", "d"], ("a", "b", "c", "d"), [[1, 2, 3, 4], [5], [6, 7], []]]
)
def test_microbatch_keeps_what_belongs_to_its_samples(names: Any) -> None:
    seen = []

    def forward(model: nn.Module, batch: Bag) -> torch.Tensor:
        seen.append((len(batch.x), batch.names))
        return F.cross_entropy(model(batch.x), batch.y)

    model = linear()
    engine = paceline.Engine(model, forward=forward, optimizer=sgd(model), microbatch=2)
    engine.step(Bag(*samples(4), names))
    assert seen == [(2, names[:2]), (2, names[2:])]


def test_count_tells_the_samples_of_a_batch_that_does_not() -> None:
    model = linear()

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        parts = zip(*batch, strict=True)
        return sum(F.cross_entropy(model(x), y) for x, y in parts) / len(batch[0])

    x, y = samples()
    ragged = [x[:2], x[2:5], x[5:]], [y[:2], y[2:5], y[5:]]
    engine = paceline.Engine(
        model, forward=forward, count=lambda batch: len(batch[0]), optimizer=sgd(model)
    )
    assert engine.step(ragged).samples == 3


def test_packed_sequence_is_moved_but_not_cut() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 3).double()
    x, y = samples(5)
    batch = pack_sequence([x[:3], x[3:]]), y[:2]

    def engine(**options: Any) -> paceline.Engine:
        return paceline.Engine(
            model, forward=lambda m, b: m(b[0])[1][0].mean(), optimizer=sgd(model), **options
        )

    assert engine().step(batch).samples == 2
    with pytest.raises(DataError, match="cannot cut a PackedSequence into microbatches"):
        engine(microbatch=1).step(batch)


def test_group_added_on_the_way_is_scheduled_too() -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    optimizer = sgd(model[1], 0.1)
    engine = paceline.Engine(
        model, loss=F.cross_entropy, optimizer=optimizer, schedule=lambda step: 0.5**step
    )
    engine.step(samples())
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
    before = model[0].weight.detach().clone()
    engine.step(samples())
    assert not torch.equal(before, model[0].weight)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out * self.scale, target)


class Activated(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def _engine(**options: Any) -> paceline.Engine:
    model = options.pop("model", None) or linear()
    return paceline.Engine(
        model, **{"loss": F.cross_entropy, "optimizer": sgd(model), **options}
    )  # fmt: skip


def _scheduler(kind: Any) -> Any:
    return kind(sgd(linear()))


WRONG = {
    "loss with parameters": (LossError, lambda: _engine(loss=Temperature()),
        "the loss has trainable parameters of its own (scale), which are neither in the optimizer "
        "nor in checkpoints. Make it a part of the model: a module that holds both and returns the "
        "loss needs no loss=."),
    "loss without gradient": (LossError,
        lambda: _engine(loss=lambda o, t: o.detach().mean()).step(samples()),
        "the loss does not depend on any parameter that requires a gradient. Is it computed from a "
        "detached tensor, or under torch.no_grad()?"),
    "pair with something else": (LossError,
        lambda: _engine(loss=lambda o, t: (F.cross_entropy(o, t), {"log": 1})).step(samples()),
        "the loss is a pair whose second part is a dict, but of a pair Paceline expects (sum, "
        "count) with one number each. Return the loss alone, or the sum and its count."),
    "factory": (TrainingError, lambda: _engine(optimizer=lambda parameters: None),
        "optimizer gave a NoneType. Pass a torch optimizer, or a function that makes one from the "
        "model's parameters, such as torch.optim.AdamW."),
    "plateau": (TrainingError,
        lambda: _engine(schedule=_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau)),
        "ReduceLROnPlateau goes by a metric, once an evaluation: pass "
        "schedule=paceline.schedules.every('evaluation', ReduceLROnPlateau, metric='loss')."),
    "foreign schedule": (TrainingError,
        lambda: _engine(schedule=_scheduler(torch.optim.lr_scheduler.ConstantLR)),
        "the schedule (ConstantLR) belongs to another optimizer, so it would change nothing here. "
        "Make it from the optimizer that you pass."),
    "schedule": (TrainingError, lambda: _engine(schedule="cosine"),
        "schedule='cosine' must be a function from the step to a factor on the learning rate, or "
        "one of torch's schedulers."),
    "norm of its own kind": (TrainingError,
        lambda: _engine(model=nn.Sequential(Activated(4)), sync_batchnorm=True),
        "sync_batchnorm: Activated is a BatchNorm with a forward of its own, which a synchronised "
        "one would drop. Use nn.BatchNorm in the model, or leave sync_batchnorm out."),
    "another optimizer's state": (CheckpointError,
        lambda: _engine().load_state_dict(_engine(optimizer=torch.optim.AdamW).state_dict()),
        "the saved state is that of another kind of optimizer: SGD needs dampening, momentum, "
        "nesterov, which it does not have. Use the optimizer of that run, or start a new run."),
    "other groups": (CheckpointError,
        lambda: _engine().load_state_dict(_engine(optimizer=lambda p: torch.optim.SGD(
            [{"params": [each]} for each in p], lr=0.5)).state_dict()),
        "the saved optimizer has parameter groups of [1, 1] tensors, this SGD of [2]. Group the "
        "parameters as they were then, or start a new run."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused_with_a_reason(name: str) -> None:
    kind, call, message = WRONG[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_state_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the saved state is that of another model"):
        _engine(model=two_layers()).load_state_dict(_engine().state_dict())
