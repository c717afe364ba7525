"""Gradients in other forms on the wire: what they must not change, and what they must remember."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import Layout
from paceline.data import share
from paceline.engine.internals import internals_of
from paceline.models.gpt import GPT, token_cross_entropy

SAMPLES = 13  # shares of it are uneven on any number of ranks
ROUNDING = {"rtol": 1e-9, "atol": 1e-11}  # float64 sums taken in another order, after Adam
LAYOUTS = [
    *("dp=2", "dp=3", "dp=4", "dp=2,zero=1", "dp=3,zero=2", "dp=4,zero=3", "dp=2,tp=2"),
    *("dp=2,pp=2", "dp=2,zero=3,pp=2"),
]


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 33, (SAMPLES, 9), generator=draw) for _ in range(steps)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def own_share(batch: Any, layout: Layout) -> Any:
    start, stop = share(SAMPLES, layout.coordinate(paceline.World.current().rank).dp, layout.dp)
    return tuple(part[start:stop] for part in batch)


def make_engine(layout: str, **options: Any) -> paceline.Engine:
    torch.manual_seed(0)
    model = GPT(vocab_size=33, context=8, layers=2, heads=4, width=16)
    settings: dict[str, Any] = {"precision": "fp64", "clip_norm": 0.5, **options}
    if isinstance(settings.get("compress"), str):
        settings["compress"] = at_once(settings["compress"])
    return paceline.Engine(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=token_cross_entropy,
        layout=layout,
        **settings,
    )


def train(layout: str, steps: int, options: dict[str, Any]) -> Any:
    engine = make_engine(layout, **options)
    losses = [engine.step(own_share(batch, engine.layout)).loss for batch in batches(steps)]
    return losses, engine.whole_parameters()


@pytest.fixture(scope="module")
def alone() -> Any:
    return train("dp=1", 3, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sending_everything_is_sending_plainly(ranks: Any, alone: Any, layout: str) -> None:
    """With accumulation, uneven shares and clipping; small tensors in the same form as others.

    Where factors of full rank are more than the matrix, it travels as it is.
    """
    cases: dict[str, dict[str, Any]] = {
        form: {"compress": in_all(form), "microbatch": 4} for form in ("topk:1", "randomk:1")
    }
    if "zero" not in layout:  # which has no whole matrices
        cases["powersgd:64"] = {"compress": "powersgd:64"}

    # One job for all: what torch finds out about a layout is then found out once.
    def job() -> Any:
        return {name: train(layout, 3, options) for name, options in cases.items()}

    losses, parameters = alone
    for found_by_rank in ranks(job, world_size=Layout.parse(layout).world_size):
        for name, (own, found) in found_by_rank.items():
            torch.testing.assert_close(own, losses, **ROUNDING, msg=saying(name))
            torch.testing.assert_close(found, parameters, **ROUNDING, msg=saying(name))


def saying(form: str) -> Any:
    """Names the form in front of what differs."""
    return lambda text: f"{form}: {text}"


def in_all(form: str) -> paceline.Compression:
    """Every tensor in this form, the smallest, too."""
    return at_once(form, smallest=0, rules={"*": form})


def at_once(form: str, **more: Any) -> paceline.Compression:
    """From the first step on, and embeddings, too: these models are hardly more than that."""
    return paceline.Compression(form, **{"warmup_steps": 0, "embeddings": True, **more})


@pytest.mark.world(3)
@pytest.mark.parametrize("form", ["topk:1", "int8", "powersgd:2"])
def test_fp16_scaling_does_not_reach_what_is_left_behind(ranks: Any, form: str) -> None:
    """Overflows at the start leave nothing behind, and the scale in force does not matter."""

    def job(form: str, scale: float) -> Any:
        engine = make_engine("dp=3", precision="fp16", compress=form, clip_norm=None)
        assert internals_of(engine).context.precision.scaler is not None
        state = internals_of(engine).context.precision.scaler.state_dict()
        internals_of(engine).context.precision.scaler.load_state_dict({**state, "scale": scale})
        skipped = [engine.step(own_share(batch, engine.layout)).skipped for batch in batches(14)]
        averaging = internals_of(engine).sync.averaging
        assert averaging is not None
        return skipped, averaging.exchange.memory.residuals, engine.whole_parameters()

    calm, overflowing = ranks(job, form, 2.0**8), ranks(job, form, 2.0**27)
    assert not any(calm[0][0])
    assert overflowing[0][0][0]
    assert not overflowing[0][0][-1]
    for _, residuals, parameters in overflowing:
        assert all(r.isfinite().all() for r in residuals.values())
        assert all(p.isfinite().all() for p in parameters.values())
        assert all(r.abs().max() < 10 for r in residuals.values())  # not 2**10 times a gradient


@pytest.mark.world(2)
def test_steps_of_different_size_leave_the_same_units(ranks: Any) -> None:
    """With accumulation a gradient is scaled afterwards: what is left must be, too.

    A short batch follows long ones. With ``topk:1`` after a step of ``topk:0.5``, everything that
    was left is sent, and has to fit.
    """

    def job(microbatch: int | None) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(8, 4, bias=False)
        engine = paceline.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.functional.mse_loss,
            layout="dp=2",
            precision="fp64",
            microbatch=microbatch,
            compress=at_once("topk:0.5", smallest=0),
        )
        draw = torch.Generator().manual_seed(1)
        for samples in (12, 3, 12):
            x, y = torch.randn(samples, 8, generator=draw), torch.randn(samples, 4, generator=draw)
            start, stop = share(samples, engine.coordinate.dp, 2)
            engine.step((x[start:stop], y[start:stop]))
        return engine.whole_parameters()

    whole, cut = ranks(job, None), ranks(job, 2)
    torch.testing.assert_close(whole[0], cut[0], **ROUNDING)


FORMS = ["fp16", "int8", "sign", "topk:0.1", "randomk:0.1", "powersgd:2", "topk:0.1+bf16"]
RESUMED = [
    *(("dp=2", FORMS), ("dp=3", FORMS), ("dp=4", ["int8"]), ("dp=2,zero=3", ["sign"])),
    *(("dp=3,zero=1", ["topk:0.1"]), ("dp=2,tp=2", ["powersgd:2", "int8"])),
    ("dp=2,pp=2", ["sign"]),
]


@pytest.mark.parametrize(("layout", "forms"), RESUMED, ids=[layout for layout, _ in RESUMED])
def test_a_resumed_run_is_equal_to_the_bit(
    ranks: Any, tmp_path: Any, layout: str, forms: list[str]
) -> None:
    data = batches(4)

    def run(form: str, folder: str, steps: list[int]) -> Any:
        compress = at_once(form, warmup_steps=1, smallest=64)
        for stop in steps:
            engine = make_engine(layout, compress=compress)
            with paceline.Checkpoints(folder, engine) as checkpoints:
                checkpoints.restore()
                for batch in data[engine.steps_done : stop]:
                    engine.step(own_share(batch, engine.layout))
                checkpoints.save()
        averaging = internals_of(engine).sync.averaging
        return engine.whole_parameters(), averaging.exchange.memory

    def job() -> Any:
        return {
            form: (
                run(form, str(tmp_path / form / "straight"), [4]),
                run(form, str(tmp_path / form / "resumed"), [1, 2, 4]),
            )
            for form in forms
        }

    for found in ranks(job, world_size=Layout.parse(layout).world_size):
        for form, ((parameters, memory), (again, memory_again)) in found.items():
            same = {"rtol": 0, "atol": 0, "msg": saying(form)}
            torch.testing.assert_close(again, parameters, **same)
            torch.testing.assert_close(memory_again.residuals, memory.residuals, **same)
            torch.testing.assert_close(memory_again.right, memory.right, **same)
            assert form == "fp16" or memory.residuals, form


@pytest.mark.parametrize(
    ("before", "after"),
    [("dp=3", "dp=2"), ("dp=2", "dp=4"), ("dp=3", "dp=1"), ("dp=4,zero=2", "dp=2,tp=2")],
)
def test_another_world_carries_over_what_was_left(
    ranks: Any, tmp_path: Any, before: str, after: str
) -> None:
    """The mean over the ranks of what is still to be sent is the same before and after."""
    forms = ["int8", "topk:0.05"]

    def run(form: str, layout: str, steps: int) -> Any:
        engine = make_engine(layout, compress=form)
        with paceline.Checkpoints(tmp_path / form, engine) as checkpoints:
            checkpoints.restore()
            for batch in batches(6)[engine.steps_done : engine.steps_done + steps]:
                engine.step(own_share(batch, engine.layout))
            if steps:
                checkpoints.save()
        inside = internals_of(engine)
        if not inside.replica.is_spread:
            inside.context.setup.apply_layout(own_share(batches(1)[0], engine.layout))
        return engine.state_dict()["compress"]

    def job(layout: str, steps: int) -> Any:
        return {form: run(form, layout, steps) for form in forms}

    sizes = [Layout.parse(layout).world_size for layout in (before, after)]
    [left, *_] = ranks(job, before, 3, world_size=sizes[0])
    [carried, *_] = ranks(job, after, 0, world_size=sizes[1])
    for form in forms:
        assert left[form], form
        assert any(value.abs().max() > 0 for value in left[form].values()), form
        torch.testing.assert_close(carried[form], left[form], **ROUNDING, msg=saying(form))
    # And it is used up: alone, a rank sends everything at once.
    if after == "dp=1":
        [rest, *_] = ranks(job, after, 1, world_size=1)
        assert rest == {form: {} for form in forms}


@pytest.mark.world(2)
def test_warm_up_steps_are_plain(ranks: Any) -> None:
    compress = at_once("sign", warmup_steps=2)
    plain = ranks(train, "dp=2", 3, {})
    warm = ranks(train, "dp=2", 3, {"compress": compress})
    assert warm[0][0] == plain[0][0]  # the third loss is that of what two steps made
    more = ranks(train, "dp=2", 4, {}), ranks(train, "dp=2", 4, {"compress": compress})
    assert more[0][0][0][3] != more[1][0][0][3]


@pytest.mark.world(2)
def test_rules_and_small_tensors(ranks: Any) -> None:
    def job() -> Any:
        compress = at_once("topk:0.01", rules={"blocks.0.*": "none"}, smallest=512)
        engine = make_engine("dp=2", compress=compress)
        engine.step(own_share(batches(1)[0], engine.layout))
        averaging = internals_of(engine).sync.averaging
        assert averaging is not None
        return sorted(averaging.exchange.memory.residuals), {
            name: p.numel() for name, p in engine.model.named_parameters() if p.ndim > 1
        }

    [(left, matrices), _] = ranks(job)
    assert left == sorted(
        name for name, size in matrices.items() if size >= 512 and not name.startswith("blocks.0.")
    )


@pytest.mark.world(2)
def test_embeddings_are_left_alone_unless_asked_for(ranks: Any) -> None:
    def job(asked: bool) -> Any:
        engine = make_engine("dp=2", compress=at_once("topk:0.01", smallest=64, embeddings=asked))
        engine.step(own_share(batches(1)[0], engine.layout))
        averaging = internals_of(engine).sync.averaging
        assert averaging is not None
        return set(averaging.exchange.memory.residuals)

    assert ranks(job, True)[0] - ranks(job, False)[0] == {"tokens.weight", "positions.weight"}


@pytest.mark.world(2)
def test_bytes_are_those_of_the_form(ranks: Any) -> None:
    """Indices and values travel, not zeros: 2 + 4 bytes an element, and few for each block."""

    def job(form: str) -> float:
        torch.manual_seed(0)
        model = nn.Linear(1024, 1024, bias=False)
        engine = paceline.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.functional.mse_loss,
            layout="dp=2",
            compress=at_once(form),
        )
        engine.step((torch.randn(2, 1024), torch.randn(2, 1024)))
        averaging = internals_of(engine).sync.averaging
        assert averaging is not None
        return averaging.exchange.wire.sent

    count = 1024 * 1024
    assert ranks(job, "fp16")[0] == 2 * count
    assert ranks(job, "int8")[0] == count + 4 * count / 1024
    assert ranks(job, "sign")[0] == count / 8 + 4 * count / 128
    chosen = -(-count // 100)
    assert ranks(job, "topk:0.01")[0] == 6 * chosen + 4 * count / 65536
    assert ranks(job, "randomk:0.01+fp16")[0] == 2 * chosen
    assert ranks(job, "powersgd:4")[0] == 4 * 4 * 2048


@pytest.mark.world(2)
def test_parameters_that_nobody_uses_keep_what_they_have(ranks: Any) -> None:
    """A step without a parameter neither sends nor forgets what is left of it."""

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)
            self.b = nn.Linear(8, 8, bias=False)
            self.both = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) if self.both else self.a(x)

    def job() -> Any:
        torch.manual_seed(0)
        model = Switched()
        engine = paceline.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.functional.mse_loss,
            layout="dp=2",
            compress=at_once("topk:0.1", smallest=0),
        )
        averaging = internals_of(engine).sync.averaging
        assert averaging is not None
        residuals = averaging.exchange.memory.residuals
        seen = []
        for both in (True, False, True):
            model.both = both
            torch.manual_seed(engine.world.rank)
            engine.step((torch.randn(3, 8), torch.randn(3, 8)))
            seen.append((residuals["b.weight"].clone(), model.b.weight.detach().clone()))
        return seen

    for (left, weight), (still, same), (other, _) in ranks(job):
        assert torch.equal(left, still)
        assert torch.equal(weight, same)
        assert not torch.equal(still, other)


@pytest.mark.world(2)
def test_frozen_parameters_do_not_disturb(ranks: Any) -> None:
    """Buckets are put together anew; what rounding lost is sent by the rank that rounded."""

    def job(layout: str) -> Any:
        engine = make_engine(layout, compress="int8")
        for number, batch in enumerate(batches(4)):
            engine.model.get_parameter("blocks.0.attention.qkv.weight").requires_grad_(number < 2)
            engine.step(own_share(batch, engine.layout))
        return engine.whole_parameters()

    found = ranks(job, "dp=3", world_size=3)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)


@pytest.mark.world(2)
def test_a_skipped_step_leaves_everything_as_it_was(ranks: Any) -> None:
    def job() -> Any:
        engine = make_engine("dp=2", compress="randomk:0.1", nonfinite="skip")
        averaging = internals_of(engine).sync.averaging
        assert averaging is not None
        engine.step(own_share(batches(1)[0], engine.layout))
        before = {n: r.clone() for n, r in averaging.exchange.memory.residuals.items()}
        # One element of one gradient on one rank, which is hardly ever the one that is drawn.
        weight = engine.model.get_parameter("blocks.1.attention.qkv.weight")

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            if engine.world.rank == 1:
                gradient = gradient.clone()
                gradient[3, 3] = torch.inf
            return gradient

        handle = weight.register_hook(spoil)
        result = engine.step(own_share(batches(2)[1], engine.layout))
        handle.remove()
        after = averaging.exchange.memory.residuals
        torch.testing.assert_close(dict(after), before, rtol=0, atol=0)
        return result.skipped

    assert ranks(job) == [True, True]


@pytest.mark.world(2)
def test_a_rank_without_samples_takes_part(ranks: Any) -> None:
    def job() -> Any:
        engine = make_engine("dp=2", compress="topk:0.1")
        for batch in batches(3):
            empty = tuple(part[:0] for part in batch)
            engine.step(batch if engine.world.rank == 0 else empty)
        return engine.whole_parameters()

    first, second = ranks(job)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layout", "form", "rule"),
    [
        ("dp=2,zero=1", "powersgd:4", "matrices-need-whole-gradients"),
        ("dp=2,zero=2,tp=2", "int8", "residuals-are-cut-once"),
        ("dp=4,zero=2,replicas=2", "sign", "copies-are-summed-by-fsdp"),
    ],
)
def test_what_is_not_sound_is_refused(ranks: Any, layout: str, form: str, rule: str) -> None:
    def job(layout: str, form: str) -> str:
        with pytest.raises(paceline.errors.LayoutError) as caught:
            make_engine(layout, compress=form)
        return str(caught.value)

    size = Layout.parse(layout).world_size
    assert all(rule in text for text in ranks(job, layout, form, world_size=size))


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"compress": "int8"}, "without compression (compress.format: none)"),
        ({"reduction": paceline.Reduction(hierarchy="always")}, "with reduction.hierarchy: auto"),
    ],
)
def test_sparse_embeddings_are_refused(options: Any, instead: str) -> None:
    with pytest.raises(paceline.errors.TrainingError, match="sparse=True") as caught:
        sparse_engine(**options)
    assert str(caught.value).endswith(f"Build it with sparse=False, or train {instead}.")


def test_sparse_embeddings_are_fine_where_nothing_is_compressed() -> None:
    """As a config says it that does not mention any of it."""
    engine = sparse_engine(compress=paceline.Compression(), reduction=paceline.Reduction())
    engine.step((torch.tensor([[1, 2]]), torch.zeros(1, 2, 2)))


def sparse_engine(**options: Any) -> paceline.Engine:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    return paceline.Engine(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.functional.mse_loss,
        **options,
    )


def test_a_run_that_goes_on_without_compression_is_told(ranks: Any) -> None:
    def state() -> Any:
        engine = make_engine("dp=2", compress="topk:0.1")
        engine.step(own_share(batches(1)[0], engine.layout))
        return engine.state_dict()

    saved = ranks(state, world_size=2)[0]
    with pytest.warns(UserWarning, match="does not compress"):
        make_engine("dp=1").load_state_dict(saved)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,pp=2", "dp=2,zero=3"])
def test_a_rule_that_matches_nothing_is_refused(ranks: Any, layout: str) -> None:
    """When the engine is made; one that matches on another pipeline stage is fine."""

    def job(layout: str) -> list[str]:
        good = at_once("int8", rules={"blocks.0.*": "fp16", "blocks.1.*": "none"})
        engine = make_engine(layout, compress=good)
        engine.step(own_share(batches(1)[0], engine.layout))
        told = []
        for pattern in ("nosuch.*", "token.weight"):
            with pytest.raises(paceline.errors.TrainingError) as caught:
                make_engine(layout, compress=at_once("int8", rules={pattern: "fp16"}))
            told.append(str(caught.value))
        return told

    size = Layout.parse(layout).world_size
    for nothing, near in ranks(job, layout, world_size=size):
        assert "'nosuch.*' matches no parameter of GPT. There are tokens.weight, " in nothing
        assert "Did you mean tokens.weight" in near


def test_a_rule_by_the_other_name_of_a_tied_weight_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(paceline.errors.TrainingError, match=r"the same parameter as '0\.weight'"):
        paceline.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.functional.mse_loss,
            compress=paceline.Compression("int8", rules={"1.weight": "none"}),
        )


def test_a_rule_for_frozen_parameters_alone_is_told() -> None:
    def notes(pattern: str) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        engine = paceline.Engine(
            model,
            optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1),
            loss=nn.functional.mse_loss,
            compress=paceline.Compression("int8", rules={pattern: "fp16"}),
        )
        return engine.take_notes()

    [told] = notes("0.*")
    assert "'0.*' matches frozen parameters only (such as 0.weight)" in told
    assert notes("*.weight") == []
