"""``hvd.DistributedOptimizer`` and what goes with it, on ranks that compare with one process."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import paceline.compat.horovod.torch as hvd

# Ranks add gradients in another order than one process does; float64 leaves that in the last bits.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    ).double()


def batch(step: int, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 1, 4, 4, generator=source, dtype=torch.float64)
    return x, torch.randint(0, 3, (samples,), generator=source)


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(hvd.size())[hvd.rank()]


def sgd(model: torch.nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def alone(passes: int = 1, lr: float = 0.1, steps: int = 3) -> torch.nn.Module:
    """What one process makes of it."""
    model = net()
    optimizer = sgd(model, lr)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = batch(step * passes + part)
            functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def together(passes: int = 1, lr: float = 0.1, steps: int = 3, **options: Any) -> torch.nn.Module:
    model = net().to(memory_format=torch.channels_last)
    if options.get("groups") == "lists":
        options["groups"] = [list(model.parameters())[:2]]
    optimizer = hvd.DistributedOptimizer(
        sgd(model, lr), model.named_parameters(), backward_passes_per_step=passes, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = batch(step * passes + part)
            functional.cross_entropy(model(share(x)), share(y)).backward()
        optimizer.step()
    return model


def same(one: torch.nn.Module, other: torch.nn.Module, **tolerance: float) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, **(tolerance or CLOSE))


def trains_like_one_process() -> None:
    same(alone(), together())
    same(alone(), together(gradient_predivide_factor=2.0))
    same(alone(), together(groups=2))
    same(alone(), together(groups="lists"))
    same(alone(passes=2), together(passes=2))
    same(alone(passes=2), together(passes=2, groups=1))
    same(alone(lr=0.1 * hvd.size()), together(lr=0.1, op=hvd.Sum))
    same(alone(), together(compression=hvd.Compression.fp16), rtol=0.02, atol=0.005)
    same(alone(), together(compression=hvd.Compression.bf16), rtol=0.1, atol=0.03)


def a_subclass_of_the_users_optimizer() -> None:
    class Scaled(torch.optim.SGD):
        """Has an argument that nobody else knows."""

        def __init__(self, params: Any, factor: float, *, lr: float) -> None:
            super().__init__(params, lr=lr)
            self.factor = factor

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad.mul_(self.factor)
            return super().step(closure)

    model = net()
    plain = Scaled(model.parameters(), 0.5, lr=0.2)
    before = torch.optim.lr_scheduler.StepLR(plain, 1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, Scaled)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "Scaled"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    x, y = batch(0)
    functional.cross_entropy(model(share(x)), share(y)).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)
    assert before.optimizer.param_groups is optimizer.param_groups
    model, calls = net(), []
    optimizer = hvd.DistributedOptimizer(sgd(model))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert len(calls) == 1


def closures_reduce_before_the_step() -> None:
    for make in (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3),
    ):
        one, several = net(), net()
        ours = hvd.DistributedOptimizer(make(several), several.named_parameters())
        theirs = make(one)
        x, y = batch(3)

        def closure(
            model: torch.nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor
        ) -> Callable[[], torch.Tensor]:
            def compute() -> torch.Tensor:
                opt.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return compute

        theirs.step(closure(one, theirs, x, y))
        ours.step(closure(several, ours, share(x), share(y)))
        if make(one).__class__ is torch.optim.SGD:
            same(one, several)
        for value in hvd.allgather_object([p.sum().item() for p in several.parameters()]):
            assert value == [p.sum().item() for p in several.parameters()]


def clipping_between_synchronize_and_step() -> None:
    one, several = net(), net()
    ours = hvd.DistributedOptimizer(sgd(several), several.named_parameters())
    theirs = sgd(one)
    x, y = batch(0)
    functional.cross_entropy(one(x), y).backward()
    torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    theirs.step()
    functional.cross_entropy(several(share(x)), share(y)).backward()
    ours.synchronize()
    torch.nn.utils.clip_grad_norm_(several.parameters(), 0.1)
    with ours.skip_synchronize():
        ours.step()
    same(one, several)
    functional.cross_entropy(several(share(x)), share(y)).backward()
    ours.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours.step()
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(said[0].message)


def errors_are_horovods() -> None:
    model = net()
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"must be unique. Found duplicates: 0.weight"):
        hvd.DistributedOptimizer(sgd(model), [*named, named[0]])
    with pytest.raises(ValueError, match="one or more model parameters were not named"):
        hvd.DistributedOptimizer(sgd(model), named[:1])
    with pytest.raises(ValueError, match="sequence of tuples"):
        hvd.DistributedOptimizer(sgd(model), model.parameters())
    with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
        hvd.DistributedOptimizer(sgd(model), named, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported"):
        hvd.DistributedOptimizer(sgd(model), named, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups must consist of"):
        hvd.DistributedOptimizer(sgd(model), named, groups=[[1]])
    with pytest.raises(ValueError, match="can only appear once"):
        hvd.DistributedOptimizer(sgd(model), named, groups=[[named[0][1]], [named[0][1]]])
    with pytest.raises(ValueError, match="non-negative integer"):
        hvd.DistributedOptimizer(sgd(model), named, groups=-1)
    with pytest.raises(NotImplementedError, match="Adasum does not support"):
        hvd.DistributedOptimizer(sgd(model), named, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(sgd(net()), num_groups=1)
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    x, y = batch(0)
    functional.cross_entropy(model(x), y).backward()
    with pytest.raises(AssertionError, match=r"zero_grad.. was called after loss.backward"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def unused_and_unfrozen_parameters() -> None:
    """A gradient that one rank alone has is averaged with zeros; what is thawed is reduced too."""
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    hvd.broadcast_parameters([*first.parameters(), *second.parameters()], 0)
    second.weight.requires_grad_(False)
    params = [*first.parameters(), *second.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    used = first if hvd.rank() == 0 else second
    used(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert first.bias.grad is not None
    torch.testing.assert_close(first.bias.grad, torch.full((2,), 1.0 / hvd.size()))
    optimizer.zero_grad()
    second.weight.requires_grad_(True)
    second(torch.full((1, 2), float(hvd.rank()))).sum().backward()
    optimizer.step()
    mean = sum(range(hvd.size())) / hvd.size()
    torch.testing.assert_close(second.weight.grad, torch.full((2, 2), mean))


def sparse_gradients() -> None:
    rows = [torch.tensor([[1, 2], [4, 4]]), torch.tensor([[1, 3], [9, 9]])]
    for as_dense in (False, True):
        torch.manual_seed(0)
        tables = [torch.nn.Embedding(10, 3, sparse=True) for _ in range(2)]
        tables[1].load_state_dict(tables[0].state_dict())
        plain = torch.optim.SparseAdam(list(tables[0].parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(tables[1].parameters()), lr=0.1), sparse_as_dense=as_dense
        )
        (sum(tables[0](row).sum() for row in rows) / 2).backward()
        plain.step()
        tables[1](rows[hvd.rank()]).sum().backward()
        optimizer.step()
        if not as_dense:  # as dense, rows of zeros are among those that Adam steps on
            torch.testing.assert_close(tables[0].weight, tables[1].weight)
        else:
            torch.testing.assert_close(tables[0].weight[[1, 3, 9]], tables[1].weight[[1, 3, 9]])


def adasum() -> None:
    """Equal steps stay one step; orthogonal ones add up."""
    for rows, expected in (([[1.0, 0.0], [1.0, 0.0]], [1.0, 0.0]), ([[1, 0], [0, 1]], [1.0, 1.0])):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.5), [("weight", weight)], op=hvd.Adasum
        )
        (weight * torch.tensor(rows[hvd.rank()])).sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="when using Adasum"), optimizer.skip_synchronize():
            pass
        optimizer.step()
        torch.testing.assert_close(weight.data, -0.5 * torch.tensor(expected))
        optimizer.zero_grad()


def process_sets() -> None:
    alone_set = hvd.add_process_set([0])
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], process_set=alone_set
    )
    (weight * (hvd.rank() + 1.0)).sum().backward()
    optimizer.step()
    assert weight.item() == -(hvd.rank() + 1.0)
    hvd.remove_process_set(alone_set)


def sync_batch_norm() -> None:
    x = torch.randn(6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.randn(6, 4, 3, dtype=torch.float64)
    target = hvd.broadcast(target, 0)
    cut = [5, 1] if hvd.size() == 2 else [6 // hvd.size()] * hvd.size()
    for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
        plain = torch.nn.BatchNorm1d(4, **options).double()
        ours = hvd.SyncBatchNorm(4, **options).double()
        for _ in range(2):
            mine = x.split(cut)[hvd.rank()].clone().requires_grad_()
            whole = x.clone().requires_grad_()
            expected, got = plain(whole), ours(mine)
            torch.testing.assert_close(got, expected.split(cut)[hvd.rank()], **CLOSE)
            (expected * target).sum().backward()
            (got * target.split(cut)[hvd.rank()]).sum().backward()
            assert whole.grad is not None
            torch.testing.assert_close(mine.grad, whole.grad.split(cut)[hvd.rank()], **CLOSE)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(hvd.allreduce(a.grad, op=hvd.Sum), b.grad, **CLOSE)
        for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        torch.testing.assert_close(ours.eval()(x), plain.eval()(x), **CLOSE)
    with pytest.raises(ValueError, match="at least 2D"):
        hvd.SyncBatchNorm(4)(torch.zeros(4))


def optimizer_states() -> None:
    """All of torch's optimizers, before and after their first steps."""
    mine = {"lr": 0.1 * (hvd.rank() + 1), "weight_decay": 0.01 * hvd.rank(), "momentum": 0.9}
    classes = sorted(
        {
            cls
            for _, cls in inspect.getmembers(torch.optim, inspect.isclass)
            if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
        },
        key=lambda cls: cls.__name__,
    )
    assert len(classes) >= 13
    for cls in classes:
        for steps in (0, 1 if hvd.rank() == 0 else 0, 2):
            torch.manual_seed(hvd.rank())
            layer = torch.nn.Linear(3, 3, bias=cls.__name__ != "Muon")
            known = inspect.signature(cls).parameters
            options = {k: v for k, v in mine.items() if k in known}
            optimizer = cls(list(layer.parameters()), **options)
            for _ in range(steps):
                loss = layer(torch.randn(2, 3)).square().sum()
                loss.backward()
                if cls is torch.optim.SparseAdam:
                    for param in layer.parameters():
                        assert param.grad is not None
                        param.grad = param.grad.to_sparse()
                optimizer.step(lambda loss=loss: loss.detach())
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
            own = optimizer.state_dict()
            root = hvd.broadcast_object(own, 0)
            assert str(own) == str(root), cls
            if cls not in (torch.optim.LBFGS, torch.optim.SparseAdam):
                optimizer.step()


def parameters_and_objects() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for params in (model.state_dict(), model.named_parameters(), list(model.parameters())):
        for param in model.parameters():
            torch.nn.init.normal_(param)
        hvd.broadcast_parameters(params, root_rank=1)
        mine = [param.tolist() for param in model.parameters()]
        assert all(other == mine for other in hvd.allgather_object(mine))
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(3, root_rank=0)
    sent = {"a": [1, 2], 3: torch.ones(2)}
    got = hvd.broadcast_object(sent if hvd.rank() == 1 else None, root_rank=1)
    assert got["a"] == [1, 2]
    assert hvd.broadcast_object_fn(1)(hvd.rank()) == 1
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]


CHECKS = [
    trains_like_one_process,
    a_subclass_of_the_users_optimizer,
    closures_reduce_before_the_step,
    clipping_between_synchronize_and_step,
    errors_are_horovods,
    unused_and_unfrozen_parameters,
    sparse_gradients,
    adasum,
    process_sets,
    sync_batch_norm,
    optimizer_states,
    parameters_and_objects,
]


def all_checks() -> None:
    hvd.init(process_sets="dynamic")
    for check in CHECKS:
        check()
    hvd.shutdown()


@pytest.mark.world(2)
def test_two_ranks(ranks: Any) -> None:
    ranks.run(all_checks)


def on_four_ranks() -> None:
    hvd.init()
    trains_like_one_process()
    hvd.shutdown()


@pytest.mark.world(4)
def test_four_ranks(ranks: Any) -> None:
    ranks.run(on_four_ranks)
