"""What a step does beyond parity: losses of every kind, empty shares, NaN, precision, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import (
    DataError,
    LayoutError,
    LossError,
    NonFiniteError,
    RankFailed,
    TrainingError,
)


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3).double()


def samples(n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(
        0, 3, (n,), generator=g
    )


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def from_parameters(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def my_slice(batch: Any) -> Any:
    """This rank's near-equal slice of a tuple of tensors."""
    world = paceline.World.current()
    start, stop = paceline.data.share(len(batch[0]), world.rank, world.size)
    return tuple(t[start:stop] for t in batch)


def expected_update(loss: Any, batch: Any) -> torch.Tensor:
    """The weight after one plain SGD step on the whole batch."""
    model = linear()
    loss(model(batch[0]), batch[1]).backward()
    return (model.weight - model.weight.grad).detach()


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
TINY_WEIGHTS = CLASS_WEIGHTS / 100  # their sum over a batch is below one
LOSSES = {
    "module": (nn.CrossEntropyLoss(), F.cross_entropy),
    "function": (F.cross_entropy, F.cross_entropy),
    "own mean": (lambda o, t: F.cross_entropy(o, t), F.cross_entropy),
    "weighted classes": (
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    ),
    "tiny class weights": (
        nn.CrossEntropyLoss(weight=TINY_WEIGHTS),
        nn.CrossEntropyLoss(weight=TINY_WEIGHTS),
    ),
    "log-likelihood": (
        lambda o, t: (F.nll_loss(o.log_softmax(1), t, reduction="sum"), t.numel()),
        F.cross_entropy,
    ),
}


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.world(3)
def test_gradient_is_the_mean_over_the_global_batch(
    ranks: Any, name: str, microbatch: int | None
) -> None:
    given, plain = LOSSES[name]

    def job() -> torch.Tensor:
        model = linear()
        engine = paceline.Engine(model, loss=given, optimizer=sgd(model), microbatch=microbatch)
        engine.step(my_slice(samples(7)))
        return model.weight.detach()

    for weight in ranks(job):
        torch.testing.assert_close(weight, expected_update(plain, samples(7)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ignored", ["some everywhere", "all of one rank", "all of a microbatch"])
@pytest.mark.world(2)
def test_ignored_targets_do_not_count(ranks: Any, ignored: str) -> None:
    def batch() -> Any:
        x, y = samples(8)
        y[{"some everywhere": slice(0, 8, 3), "all of one rank": slice(4, 8)}.get(
            ignored, slice(0, 2)
        )] = -100  # fmt: skip
        return x, y

    def job() -> torch.Tensor:
        model = linear()
        engine = paceline.Engine(
            model, loss=nn.CrossEntropyLoss(), optimizer=sgd(model), microbatch=2
        )
        engine.step(my_slice(batch()))
        return model.weight.detach()

    expected = expected_update(F.cross_entropy, batch())
    for weight in ranks(job):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)


class OwnLoss(nn.Module):
    """Returns its loss in the form that ``form`` names."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = linear(), form

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(self.inner(x), y)
        if self.form == "scalar":
            return loss
        if self.form == "pair":
            return loss * len(x), len(x)
        return {"loss": loss, "logits": None}


@pytest.mark.parametrize("form", ["scalar", "pair", "mapping"])
def test_model_that_returns_its_own_loss(form: str) -> None:
    model = OwnLoss(form)
    engine = paceline.Engine(model, optimizer=sgd(model), microbatch=3)
    x, y = samples(7)
    engine.step({"x": x, "y": y} if form == "mapping" else (x, y))
    torch.testing.assert_close(
        model.inner.weight.detach(), expected_update(F.cross_entropy, (x, y)), rtol=0, atol=1e-12
    )


def test_mapping_batch_gives_forward_the_keys_it_names_and_the_loss_all_of_them() -> None:
    model = linear()
    x, y = samples(6)
    engine = paceline.Engine(
        model, loss=lambda out, batch: F.cross_entropy(out, batch["label"]), optimizer=sgd(model)
    )
    engine.step({"input": x, "label": y, "name": ["a"] * 6})
    torch.testing.assert_close(
        model.weight.detach(), expected_update(F.cross_entropy, (x, y)), rtol=0, atol=1e-12
    )


def test_custom_forward_and_count() -> None:
    model = linear()
    x, y = samples(6)
    engine = paceline.Engine(
        model,
        forward=lambda model, batch: F.cross_entropy(model(batch["deep"]["x"]), batch["y"]),
        count=lambda batch: len(batch["y"]),
        optimizer=sgd(model),
        microbatch=4,
    )
    engine.step({"deep": {"x": x}, "y": y})
    torch.testing.assert_close(
        model.weight.detach(), expected_update(F.cross_entropy, (x, y)), rtol=0, atol=1e-12
    )


@pytest.mark.world(4)
def test_ranks_without_samples_take_part(ranks: Any) -> None:
    def job() -> Any:
        model = linear()
        engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=sgd(model))
        batch = my_slice(samples(2))
        result = engine.step(batch)
        return len(batch[0]), result.samples, result.loss, model.weight.detach()

    results = ranks(job)
    assert [n for n, *_ in results] == [1, 1, 0, 0]
    for _, count, loss, weight in results:
        assert count == 2
        assert loss == results[0][2]
        torch.testing.assert_close(
            weight, expected_update(F.cross_entropy, samples(2)), rtol=0, atol=1e-12
        )


@pytest.mark.world(3)
def test_empty_share_leaves_synchronised_batchnorm_right(ranks: Any) -> None:
    """Two samples on three ranks: the third must not blend anything into the statistics."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    def job() -> Any:
        model = net()
        engine = paceline.Engine(
            model, loss=F.cross_entropy, optimizer=sgd(model, 0.1), sync_batchnorm=True
        )
        for n in (2, 6):
            engine.step(my_slice(samples(n)))
        return model.state_dict()

    model = net()
    optimizer = sgd(model, 0.1)
    for n in (2, 6):
        x, y = samples(n)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for state in ranks(job):
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-10, atol=1e-12)


class Branches(nn.Module):
    """Uses a part of its parameters only, which part depending on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.positive, self.never = linear(0), linear(1), linear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.positive(x) if x[0, 0] > 0 else y


@pytest.mark.world(2)
def test_unused_parameters_are_left_alone(ranks: Any) -> None:
    def job() -> Any:
        model = Branches()
        engine = paceline.Engine(
            model,
            loss=F.cross_entropy,
            # Weight decay would move a parameter whose gradient is zero instead of absent.
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
            microbatch=1,
        )
        before = model.never.weight.clone()
        x, y = samples(4)
        # Rank 0 uses the branch in its first microbatch only, rank 1 never does.
        x[:, 0] = torch.tensor([1.0, -1.0, -1.0, -1.0])
        for _ in range(2):
            engine.step(my_slice((x, y)))
        return torch.equal(before, model.never.weight), model.state_dict()

    results = ranks(job)
    assert all(untouched for untouched, _ in results)

    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        x, y = samples(4)
        x[:, 0] = torch.tensor([1.0, -1.0, -1.0, -1.0])
        optimizer.zero_grad()
        sum(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) / 4 for i in range(4)).backward()
        optimizer.step()
    for _, state in results:
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
def test_nan_loss_stops_and_names_step_and_rank(ranks: Any) -> None:
    def job() -> Any:
        model = linear()
        engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=sgd(model))
        engine.step(my_slice(samples(4)))
        before = model.weight.detach().clone()
        x, y = samples(4)
        x[3, 0] = float("nan")
        try:
            engine.step(my_slice((x, y)))
        except NonFiniteError as error:
            untouched = torch.equal(before, model.weight)
            # Whoever catches it can go on: nothing of the bad gradient is left.
            assert engine.step(my_slice(samples(4))).step == 2
            return str(error), error.step, error.ranks, untouched

    for message, step, at, untouched in ranks(job):
        assert message == (
            "step 2: the loss is nan on rank 1 (world of 2). The parameters were not updated. Look "
            "at the data of this step and at the learning rate, or pass nonfinite='skip' to leave "
            "such steps out."
        )
        assert (step, at, untouched) == (2, (1,), True)


@pytest.mark.world(2)
def test_infinite_gradient_with_finite_loss_names_rank_and_parameter(ranks: Any) -> None:
    def job() -> Any:
        model = linear()

        def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            # The square root has an infinite slope at zero: finite value, infinite gradient.
            return (out.sum(1) * 0 * (target == 2)).sqrt().mean() + out.mean()

        engine = paceline.Engine(model, loss=loss, optimizer=sgd(model))
        x, y = samples(4)
        y = torch.tensor([0, 0, 2, 0])
        try:
            engine.step(my_slice((x, y)))
        except NonFiniteError as error:
            return error.ranks, str(error)

    for at, message in ranks(job):
        assert "gradients are not finite" in message
        assert "weight, bias" in message
        assert 1 in at


@pytest.mark.world(2)
def test_skipped_step_leaves_parameters_and_statistics_alone(ranks: Any) -> None:
    def job() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        engine = paceline.Engine(
            model, loss=F.cross_entropy, optimizer=sgd(model), nonfinite="skip"
        )
        x, y = samples(8)
        bad = x.clone()
        bad[0, 0] = float("inf")
        engine.step(my_slice((x, y)))
        with engine.evaluating():  # gives every rank the statistics of rank 0
            before = {k: v.clone() for k, v in model.state_dict().items()}
        result = engine.step(my_slice((bad, y)))
        same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        after = engine.step(my_slice((x, y)))
        return result.skipped, result.problem.ranks, same, after.skipped

    assert ranks(job) == [(True, [0], True, False)] * 2


def test_batch_with_nothing_to_count_is_named() -> None:
    model = linear()
    engine = paceline.Engine(model, loss=nn.CrossEntropyLoss(), optimizer=sgd(model))
    x, y = samples(4)
    with pytest.raises(NonFiniteError, match="counts no item of the global batch"):
        engine.step((x, torch.full_like(y, -100)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.world(2)
def test_low_precision_stays_near_fp32(ranks: Any, precision: str) -> None:
    def job(precision: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
        engine = paceline.Engine(
            model,
            loss=F.cross_entropy,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            precision=precision,
            clip_norm=1.0,
            microbatch=3,
        )
        x, y = samples(10)
        return [engine.step(my_slice((x.float(), y))).loss for _ in range(20)]

    low, full = ranks(job, precision)[0], ranks(job, "fp32")[0]
    assert full[-1] < full[0] * 0.9
    # bf16 keeps 8 bits: a loss near 1 is known to about 1/256, and the errors of 20 steps add up.
    torch.testing.assert_close(torch.tensor(low), torch.tensor(full), rtol=0.03, atol=0)


def test_fp16_overflow_is_skipped_and_lowers_the_scale() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    engine = paceline.Engine(
        # Finite as a loss, but its gradient times the scale is far above fp16's largest, 65504.
        model, loss=lambda o, t: o.float().mean() * 1e6, optimizer=sgd(model), precision="fp16",
    )  # fmt: skip
    before = model.weight.detach().clone()
    x, y = samples(4)
    result = engine.step((x.float(), y))
    assert result.skipped
    assert result.problem is not None
    assert result.problem.overflow
    assert torch.equal(before, model.weight)
    assert engine.state_dict()["scaler"]["scale"] == 2.0**15


def test_value_clipping_bounds_each_element() -> None:
    model = linear()
    before = model.weight.detach().clone()
    engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=sgd(model), clip_value=0.01)
    engine.step(samples(5))
    moved = (model.weight.detach() - before).abs()
    assert moved.max() == pytest.approx(0.01)


def test_schedule_function_and_torch_scheduler_set_the_rate() -> None:
    model = linear()
    engine = paceline.Engine(
        model, loss=F.cross_entropy, optimizer=sgd(model, 0.5), schedule=lambda step: 1 / (step + 1)
    )
    assert [engine.step(samples(4)).lr for _ in range(3)] == [0.5, 0.25, 0.5 / 3]
    optimizer = sgd(model, 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=optimizer, schedule=scheduler)
    assert [engine.step(samples(4)).lr for _ in range(4)] == pytest.approx([1.0, 1.0, 0.1, 0.1])


def test_fp64_keeps_a_models_own_casts_in_double() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x).float().to(torch.float32)
            return F.softmax(out, dim=1, dtype=torch.float32)

    model = Casts()
    seen = []

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(out.dtype)
        return F.nll_loss(out.log(), target)

    engine = paceline.Engine(model, loss=loss, optimizer=from_parameters, precision="fp64")
    x, y = samples(4)
    engine.step((x.float(), y))
    assert seen == [torch.float64]


def test_state_round_trip_continues_the_same_run() -> None:
    def make() -> paceline.Engine:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return paceline.Engine(
            model,
            loss=F.cross_entropy,
            optimizer=torch.optim.AdamW(model.parameters()),
            precision="fp16",
            schedule=lambda step: 0.9**step,
        )

    x, y = samples(6)
    batch = (x.float(), y)
    one = make()
    for _ in range(3):
        one.step(batch)
    two = make()
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert [one.step(batch).loss for _ in range(3)] == [two.step(batch).loss for _ in range(3)]


@pytest.mark.world(2)
def test_optimizer_factory_sees_the_trainable_parameters(ranks: Any) -> None:
    def job() -> bool:
        model = nn.Sequential(linear(), linear().requires_grad_(False))
        model[1] = nn.Linear(3, 3).double().requires_grad_(False)
        engine = paceline.Engine(model, loss=F.cross_entropy, optimizer=from_parameters)
        before = model[1].weight.clone()
        engine.step(my_slice(samples(4)))
        held = sum(p.numel() for g in engine.optimizer.param_groups for p in g["params"])
        return torch.equal(before, model[1].weight) and held == 15

    assert all(ranks(job))


class NoLoss(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3, dtype=torch.float64)

    def forward(self, input: torch.Tensor) -> Any:
        return {"logits": super().forward(input)}


WRONG = {
    "unknown option": (
        TrainingError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, clip=1.0),
        "Engine got an unknown argument clip. Did you mean clip_norm?",
    ),
    "unknown option that is like none": (
        TrainingError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, zzzz=1.0),
        "Engine got an unknown argument zzzz. It takes "
        "checkpoint_activations, clip_norm, clip_value, compile, compress, count, device_map, "
        "ema, forward, freeze, init, initial_weights, layout, local_steps, loss_scaling, "
        "max_memory, microbatch, nonfinite, pipeline, precision, randomness, reduction, schedule, sharding, "
        "sync_batchnorm, tensor, unfreeze_at.",
    ),
    "not a module": (
        TrainingError,
        lambda: paceline.Engine(print, optimizer=from_parameters),
        "model=<built-in function print> must be a torch.nn.Module. Build the model first and pass it.",
    ),
    "nothing to train": (
        TrainingError,
        lambda: paceline.Engine(nn.ReLU(), optimizer=from_parameters),
        "ReLU has no parameter that requires a gradient: nothing to train.",
    ),
    "microbatch": (
        TrainingError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, microbatch=0),
        "microbatch=0 must be a whole number of samples, 1 or more.",
    ),
    "clip": (
        TrainingError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, clip_norm=-1.0),
        "clip_norm=-1.0 must be a number greater than 0, or None for no clipping.",
    ),
    "policy": (
        TrainingError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, nonfinite="warn"),
        "nonfinite='warn' must be one of stop, skip, ignore.",
    ),
    "precision": (
        TrainingError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, precision="fp8"),
        "precision='fp8' must be one of fp32, bf16, fp16, fp64.",
    ),
    "layout too large": (
        LayoutError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, layout="dp=4"),
        "layout 'dp=4' needs 4 ranks (dp=4), but the world has 1. Start 4 ranks, or change the "
        "layout.",
    ),
    "layout against a rule": (
        LayoutError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, layout="dp=1,ep=1,cp=2"),
        "layout 'dp=1,cp=2': cp=2 is not available in this version, which trains dp, zero, "
        "replicas, tp and pp. Leave cp out. [rule: axis-not-available]",
    ),
    "foreign optimizer": (
        TrainingError,
        lambda: paceline.Engine(linear(), optimizer=sgd(linear())),
        "2 of the optimizer's parameters do not belong to the model. Make the optimizer from this "
        "model's parameters(), after any change to the model.",
    ),
    "lbfgs": (
        TrainingError,
        lambda: paceline.Engine(m := linear(), optimizer=torch.optim.LBFGS(m.parameters())),
        "LBFGS evaluates the loss several times a step, which Engine.step does not do. Use an "
        "optimizer that needs one gradient a step, such as AdamW or SGD.",
    ),
    "loss and forward": (
        LossError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, loss=F.cross_entropy, forward=print),
        "both loss= and forward= are given. Pass loss=f, called as f(output, target), or "
        "forward=f, called as f(model, batch) and returning the loss: not both.",
    ),
    "summed loss": (
        LossError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, loss=nn.CrossEntropyLoss(reduction="sum")),
        "CrossEntropyLoss(reduction='sum') cannot be averaged over the global batch: its count is "
        "unknown. Use reduction='mean', or a function that returns (sum, count).",
    ),
    "loss per sample": (
        LossError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, loss=lambda o, t: o.sum(1)).step(samples(4)),
        "the loss has shape (4,), but one number is needed. Return the mean over the samples, or a "
        "pair (sum, count) for a mean over tokens.",
    ),
    "loss is no tensor": (
        LossError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, loss=lambda o, t: 1.0).step(samples(4)),
        "the loss is a float, not a tensor. Return a scalar tensor (the mean over the samples) or "
        "a pair (sum, count).",
    ),
    "no loss at all": (
        LossError,
        lambda: paceline.Engine(NoLoss(), optimizer=from_parameters).step({"input": samples(4)[0]}),
        "no loss function was given, and the model's output (dict) holds no loss. Pass loss=, or "
        "return the loss from the model (a scalar, a (sum, count) pair, or an output with .loss; "
        "Hugging Face models do so when the batch has 'labels').",
    ),
    "batch without tensors": (
        DataError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, loss=F.cross_entropy).step(["a", "b"]),
        "cannot count the samples of a batch of type list: it holds no tensor with a batch "
        "dimension. Return tensors from the dataset (or collate_fn), or pass count= to the engine.",
    ),
    "ragged batch": (
        DataError,
        lambda: paceline.Engine(linear(), optimizer=from_parameters, loss=F.cross_entropy).step(
            (samples(4)[0], samples(5)[1])
        ),
        "cannot count the samples of a batch whose tensors disagree in dimension 0: batch[0] has "
        "shape (4, 4); batch[1] has shape (5,). Put the samples first in every tensor, or pass "
        "count= to the engine.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_say_what_and_why(name: str) -> None:
    kind, call, message = WRONG[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.world(2)
def test_error_in_the_model_of_one_rank_is_that_error(ranks: Any) -> None:
    def job() -> None:
        def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if paceline.World.current().rank == 1:
                raise ZeroDivisionError("the user's own bug")
            return F.cross_entropy(out, target)

        model = linear()
        paceline.Engine(model, loss=loss, optimizer=sgd(model)).step(my_slice(samples(4)))

    with pytest.raises(RankFailed, match="the user's own bug"):
        ranks(job)


def test_compiled_model_trains_the_same_and_keeps_its_names(ranks: Any) -> None:
    def job(compile: bool) -> Any:
        model = linear()
        engine = paceline.Engine(
            model, loss=F.cross_entropy, optimizer=sgd(model, 0.1), compile=compile
        )
        losses = [engine.step(my_slice(samples(6))).loss for _ in range(3)]
        return losses, sorted(engine.state_dict()["model"])

    plain = ranks(job, False, world_size=2)[0]
    compiled = ranks(job, True, world_size=2, timeout=150)[0]
    assert compiled[0] == pytest.approx(plain[0], rel=1e-10)
    assert compiled[1] == plain[1] == ["bias", "weight"]
