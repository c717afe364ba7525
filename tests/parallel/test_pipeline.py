"""A pipeline of any shape and schedule computes what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.engine.loss import LossModule
from paceline.errors import LayoutError, RankFailed
from paceline.layout.pipeline_schedules import build_schedule
from paceline.parallel.blocks import find_blocks
from paceline.parallel.pipeline import Pipeline, Pipelining, cut
from parallel import pipeline_cases
from parallel.pipeline_cases import DOUBLE, SCALE, STEPS

CPU = torch.device("cpu")


def build(name: str, schedule: str, pp: int, mesh: Any = None) -> tuple[Any, Pipeline]:
    case = pipeline_cases.make(name)
    options = Pipelining(schedule=schedule)
    sample = case.batch(0, 2)

    def probe() -> Any:
        with DOUBLE.forward():
            return case.module(sample, 2)

    plan = cut(case.module, probe, pp, options)
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank("pp")
    return case, Pipeline(
        case.module,
        plan,
        rank=rank,
        pp=pp,
        group=group,
        device=CPU,
        options=options,
        context=DOUBLE.forward,
    )


def train(name: str, schedule: str, pp: int, reshard: bool | None = None) -> Any:
    """Three steps and an evaluation on this rank; with ``reshard``, sharded over two copies."""
    mesh, share = None, 0
    if reshard is not None:
        mesh = init_device_mesh("cpu", (pp, 2), mesh_dim_names=("pp", "shards"))
        share = mesh.get_local_rank("shards")
    case, pipeline = build(name, schedule, pp, mesh)
    if mesh is not None:
        for stage in pipeline.stages:
            for block in find_blocks(stage):
                fully_shard(
                    stage.get_submodule(block), mesh=mesh["shards"], reshard_after_forward=reshard
                )
            fully_shard(stage, mesh=mesh["shards"], reshard_after_forward=reshard)
    trained = pipeline_cases.optimizer(p for _, p in pipeline.named_parameters())
    losses = []
    scale = torch.tensor(SCALE * (2 if mesh is not None else 1), dtype=torch.float64)
    for step in range(len(STEPS)):
        trained.zero_grad()
        terms = pipeline.step(pipeline_cases.parts(case, step, share), scale)
        pipeline.sync_tied()
        trained.step()
        assert (terms[0] is not None) == pipeline.holds_last
        if terms[0] is not None:
            losses.append(float(sum(t.total for t in terms) / sum(t.count for t in terms)))
    case.module.eval()
    evaluated = pipeline.evaluate(pipeline_cases.parts(case, 0))
    held = {
        key: [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in copies]
        for key, copies in pipeline.held().items()
    }
    return {
        "losses": losses,
        "evaluated": [] if evaluated[0] is None else [float(t.total) for t in evaluated],
        "parameters": held,
        "buffers": {key: b.clone() for key, b in pipeline.named_buffers()},
        "live": pipeline.most_live,
    }


def assert_same_as_one_process(name: str, results: list[Any], shares: int = 1) -> None:
    losses, state, evaluated = pipeline_cases.reference(name, shares)
    last = next(r for r in results if r["losses"])
    if shares == 1:
        assert last["losses"] == pytest.approx(losses, rel=1e-10)
    assert last["evaluated"] == pytest.approx(evaluated, rel=1e-10)
    for result in results:
        for key, copies in result["parameters"].items():
            for copy in copies:
                torch.testing.assert_close(copy, state[key], rtol=1e-9, atol=1e-11)
        for key, buffer in result["buffers"].items():
            if key in state:
                torch.testing.assert_close(buffer, state[key], rtol=1e-9, atol=1e-11)
    names = {key for key, _ in pipeline_cases.make(name).module.model.named_parameters()}
    assert set().union(*(r["parameters"] for r in results)) == names


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt", "1f1b"),
        ("gpt", "zbv"),
        ("mlp", "gpipe"),
        ("resnet", "1f1b"),
        ("unet", "interleaved-zero-bubble"),
        ("odd", "dualpipev"),
        ("repeated", "zbv"),
        ("frozen-start", "zbv"),
        ("frozen-end", "1f1b"),
        ("gpt2", "interleaved-1f1b"),
        ("llama", "1f1b"),
        ("bert", "gpipe"),
        ("t5", "zbv"),
    ],
)
@pytest.mark.world(2)
def test_two_ranks(ranks: Any, name: str, schedule: str) -> None:
    results = ranks(train, name, schedule, 2)
    assert_same_as_one_process(name, results)
    expected = build_schedule(schedule, 2, len(STEPS[0])).most_live
    assert [r["live"] for r in results] == expected


@pytest.mark.world(4)
def test_four_ranks(ranks: Any) -> None:
    results = ranks(train, "unet", "1f1b", 4)
    assert_same_as_one_process("unet", results)
    assert [r["live"] for r in results] == [4, 3, 2, 1]


@pytest.mark.parametrize(("schedule", "reshard"), [("1f1b", True), ("zbv", False)])
@pytest.mark.world(4)
def test_sharded_stages(ranks: Any, schedule: str, reshard: bool) -> None:
    results = ranks(train, "gpt", schedule, 2, reshard)
    losses, state, _ = pipeline_cases.reference("gpt", shares=2)
    assert len(losses) == len(STEPS)
    for result in results:
        for key, copies in result["parameters"].items():
            for copy in copies:
                torch.testing.assert_close(copy, state[key], rtol=1e-9, atol=1e-11)


@pytest.mark.world(2)
def test_a_rank_holds_its_own_parameters_alone(ranks: Any) -> None:
    def held() -> tuple[int, int, bool]:
        case, pipeline = build("unet", "1f1b", 2)
        everything = sum(p.numel() for p in pipeline_cases.make("unet").module.parameters())
        real = sum(p.numel() for p in case.module.parameters() if not p.is_meta)
        own = sum(p.numel() for _, p in pipeline.named_parameters())
        return own, everything, real <= own

    results = ranks(held)
    assert sum(own for own, _, _ in results) == results[0][1]
    assert all(alone for _, _, alone in results)


@pytest.mark.world(2)
def test_tied_weights_are_counted_once(ranks: Any) -> None:
    def duplicates() -> tuple[list[str], list[str]]:
        _, pipeline = build("gpt", "1f1b", 2)
        ids = {id(p) for p in pipeline.duplicates()}
        return (
            [name for name, p in pipeline.named_parameters() if id(p) in ids],
            [name for name, _ in pipeline.named_parameters()],
        )

    first, last = ranks(duplicates)
    assert first[0] == []
    assert last[0] == ["tokens.weight"]
    assert "tokens.weight" in first[1]


@pytest.mark.world(2)
def test_an_error_in_a_stage_is_the_users_own(ranks: Any) -> None:
    def fail() -> None:
        case, pipeline = build("mlp", "1f1b", 2)

        def broken(*args: Any) -> Any:
            raise ArithmeticError("the third layer is broken")

        if pipeline.holds_last:
            pipeline.stages[0].get_submodule("4").register_forward_hook(broken)
        pipeline.step(pipeline_cases.parts(case, 0))

    with pytest.raises(RankFailed, match="raised ArithmeticError: the third layer is broken"):
        ranks(fail)


@pytest.mark.world(2)
def test_too_few_microbatches_are_refused_with_the_numbers(ranks: Any) -> None:
    def few() -> str:
        case, pipeline = build("mlp", "1f1b", 2)
        assert pipeline.minimum() == 2
        with pytest.raises(LayoutError) as refusal:
            pipeline.step(pipeline_cases.parts(case, 0)[:1])
        return str(refusal.value)

    for message in ranks(few):
        assert "microbatches=1" in message
        assert "2 stages" in message


@pytest.mark.world(2)
def test_dropout_and_autocast(ranks: Any) -> None:
    def run() -> list[float]:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Dropout(0.5))])
        module = LossModule(model, nn.CrossEntropyLoss())
        batch = torch.randn(4, 8), torch.randint(8, (4,))

        def context() -> Any:
            return torch.autocast("cpu", dtype=torch.bfloat16)

        def probe() -> Any:
            with context():
                return module(batch, 4)

        pipeline = Pipeline(
            module,
            cut(module, probe, 2),
            rank=dist.get_rank(),
            pp=2,
            group=dist.group.WORLD,
            device=CPU,
            context=context,
        )
        terms = pipeline.step([(batch, 4)] * 2)
        assert all(p.grad is not None for _, p in pipeline.named_parameters())
        return [float(t.total) for t in terms if t is not None]

    first, last = ranks(run)
    assert first == []
    assert last[0] != last[1]  # another draw for each microbatch
