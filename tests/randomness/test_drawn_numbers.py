"""The numbers themselves: uniform, independent, and right for every function that draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.randomness import ForwardRandomness, TensorPart
from paceline.randomness.attribution import WHOLE_BATCH, Attribution, attribute, still_fits
from paceline.randomness.counter import Numbers, hashed, sample_keys
from paceline.randomness.keys import words
from paceline.randomness.table import lay_out

SAMPLES, WIDTH = 64, 4096


def numbers(name: str = "block", step: int = 0, seed: int = 0) -> Numbers:
    keys = sample_keys(torch.arange(SAMPLES, dtype=torch.int32), words(4, seed, step))
    first, second = words(2, name)
    return Numbers(keys[0] + first, keys[1] ^ second, torch.arange(WIDTH, dtype=torch.int32))


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent numbers give."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(a.numel())


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_overall_and_in_each_sample(rate: float) -> None:
    dropped = (~numbers().keep(rate)).double()
    deviation = math.sqrt(rate * (1 - rate))
    assert abs(float(dropped.mean()) - rate) < 4 * deviation / math.sqrt(dropped.numel())
    by_sample = (dropped.mean(1) - rate) / deviation * math.sqrt(WIDTH)
    by_place = (dropped.mean(0) - rate) / deviation * math.sqrt(SAMPLES)
    assert float(by_sample.abs().max()) < 5
    assert 0.7 < float(by_sample.square().mean()) < 1.4
    assert 0.9 < float(by_place.square().mean()) < 1.1


def test_masks_of_samples_steps_modules_seeds_and_places_are_independent() -> None:
    mask = numbers().keep(0.5)
    others = [numbers(name="blocks"), numbers(step=1), numbers(seed=1)]
    for other in others:
        assert abs(correlation(mask, other.keep(0.5))) < 4
    for shift in (1, 2, 32, 63):
        assert abs(correlation(mask, mask.roll(shift, 0))) < 4
    for shift in (1, 2, 64, 768, 1024):
        assert abs(correlation(mask, mask.roll(shift, 1))) < 4
    pairs = torch.corrcoef(mask.double()) * math.sqrt(WIDTH)  # every sample with every other
    off = pairs[~torch.eye(SAMPLES, dtype=torch.bool)]
    assert float(off.abs().max()) < 5.5
    assert 0.9 < float(off.square().mean()) < 1.1


def test_every_bit_of_the_key_and_of_the_place_changes_half_of_the_bits() -> None:
    z = torch.arange(-50_000, 50_000, dtype=torch.int32) * 7919
    key = torch.tensor(12345, dtype=torch.int32)
    right = hashed(z.clone(), key)
    for bit in range(32):
        flip = torch.tensor(1, dtype=torch.int32) << bit
        for changed in (hashed(z ^ flip, key), hashed(z.clone(), key ^ flip)):
            differs = torch.stack([((right ^ changed) >> i & 1).double().mean() for i in range(32)])
            assert float((differs - 0.5).abs().max()) < 0.02, bit


def test_words_bytes_and_runs_are_uniform() -> None:
    drawn = numbers().words()
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((drawn >> shift & 255).flatten(), minlength=256).double()
        expected = drawn.numel() / 256
        chi = float(((counts - expected).square() / expected).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255), shift
    assert drawn.flatten().unique().numel() > drawn.numel() - 40  # 8 pairs by birthday, on average
    u = numbers().uniform(torch.float64)
    assert 0 <= float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    normal = numbers().normal(torch.float64)
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(normal.std()) - 1) < 0.01
    assert abs(float(normal.pow(4).mean()) - 3) < 0.1
    assert abs(float(numbers().exponential(torch.float32).mean()) - 1) < 0.01


def test_large_tables_are_computed_in_pieces_alike() -> None:
    large = numbers()
    small = Numbers(large.first[3:5], large.second[3:5], large.positions[100:200])
    assert torch.equal(large.words()[3:5, 100:200], small.words())
    assert torch.equal(large.keep(0.3)[3:5, 100:200], small.keep(0.3))


def test_the_numbers_are_what_they_were() -> None:
    """A run that is resumed with a later version goes on with the same masks."""
    keys = sample_keys(torch.arange(2, dtype=torch.int32), words(4, 0, 0))
    found = Numbers(*keys, torch.arange(3, dtype=torch.int32)).words().tolist()
    assert found == [[1061943877, -1857041657, -1781955472], [-1623353677, 919081124, -537245458]]


# ---------------------------------------------------------------------- parts


def test_a_part_has_the_numbers_of_the_whole() -> None:
    keys = sample_keys(torch.arange(-1, 4, dtype=torch.int32), words(4, 0, 0))
    site, shape = (5, 7), (4, 6, 3, 8)
    whole = lay_out(keys, site, Attribution(0), shape, None).of(Numbers.words)
    full = [[(0, size)] for size in shape]
    heads = TensorPart(shape, [full[0], [(2, 2)], full[2], full[3]])
    packed = TensorPart(shape, [*full[:3], [(0, 2), (4, 2)]])
    both = TensorPart(shape, [[(1, 2)], full[1], full[2], [(6, 2)]])
    for part, expected in (
        (heads, whole[:, 2:4]),
        (packed, whole[..., [0, 1, 4, 5]]),
        (both, whole[1:3, ..., 6:]),
    ):
        assert torch.equal(
            lay_out(keys, site, Attribution(0), shape, part).of(Numbers.words), expected
        )
    second = lay_out(keys, site, Attribution(1), (6, 4, 3), None).of(Numbers.words)
    first = lay_out(keys, site, Attribution(0), (4, 6, 3), None).of(Numbers.words)
    assert torch.equal(second.transpose(0, 1), first)
    folded = lay_out(keys, site, Attribution(0, 6), (24, 3), None).of(Numbers.words)
    assert torch.equal(folded.view(4, 6, 3), first)


def test_where_the_samples_are() -> None:
    assert attribute((8, 8, 3), 8, computed=True) == Attribution(0)
    assert attribute((8, 8, 3), 8, computed=True, time_first=True) == Attribution(1)
    assert attribute((5, 8, 3), 8, computed=True) == Attribution(1)
    assert attribute((5, 8, 3), 8, computed=False) is None
    assert attribute((40, 3), 8, computed=True) == Attribution(0, 5)
    assert attribute((40, 8, 3), 8, computed=True) == Attribution(1)
    assert attribute((40, 8, 3), 8, computed=True, folded=True) == Attribution(0, 5)
    assert attribute((5, 8, 8, 3), 8, computed=True) is None
    assert attribute((5, 8, 8), 8, computed=True) == Attribution(1)
    assert attribute((40, 8), 8, computed=True) == Attribution(0, 5)
    assert attribute((), 8, computed=False) == WHOLE_BATCH
    assert attribute((1, 1), 8, computed=False) == WHOLE_BATCH
    assert attribute((3,), None, computed=True) is None
    assert still_fits(Attribution(1), (8, 8, 3), 8) == Attribution(1)
    assert still_fits(Attribution(0, 5), (10, 3), 2) == Attribution(0, 5)
    assert still_fits(Attribution(1), (8, 9, 3), 8) is None


# ---------------------------------------------------------------------- functions

X = torch.arange(12 * 6 * 4, dtype=torch.float64).view(12, 6, 4).sin()
ONES = torch.ones(12, 6, 4, dtype=torch.float64)
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.3),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.abs()),
    "bernoulli_": lambda x: x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7),
    "rand": lambda x: torch.rand(x.shape[0], 1),
    "rand of a size": lambda x: torch.rand(x.shape, dtype=torch.float64),
    "randn": lambda x: torch.randn(x.shape[0], 3),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint": lambda x: torch.randint(0, 1000, (x.shape[0],)),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "multinomial": lambda x: torch.multinomial(x[:, :, 0].abs(), 3),
    "multinomial with replacement": lambda x: torch.multinomial(x[:, :, 0].abs(), 5, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "folded": lambda x: F.dropout(x.flatten(0, 1), 0.3).view(x.shape),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        x, x, x, torch.ones(6, 6, dtype=torch.bool).tril(-1), dropout_p=0.3
    ),
}


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def drawn(function: Callable[[Tensor], Tensor], rows: list[int], x: Tensor = X) -> Any:
    model = Calls(function)
    random = ForwardRandomness(0, strict=True)
    random.watch(model, (), torch.device("cpu"), compiled=False)
    part = x[rows]
    random.begin("training", 0, [(part, torch.tensor(rows))])
    random.select(part)
    before = torch.get_rng_state()
    with random.forward():
        result = model(part)
    assert torch.equal(before, torch.get_rng_state()), "it drew from torch's own stream"
    return result


@pytest.mark.parametrize("name", DRAWS)
def test_a_function_draws_by_sample(name: str) -> None:
    whole = drawn(DRAWS[name], list(range(12)))
    parts = [drawn(DRAWS[name], rows) for rows in ([0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11])]
    torch.testing.assert_close(torch.cat(parts), whole)
    order = [5, 0, 11, 3]
    torch.testing.assert_close(drawn(DRAWS[name], order), whole[order])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own = DRAWS[name](X)
    assert (whole.shape, whole.dtype) == (own.shape, own.dtype)
    assert torch.isfinite(whole).all()


@pytest.mark.parametrize("name", ["alpha_dropout", "bernoulli", "normal_", "uniform_", "rrelu"])
def test_it_is_distributed_as_torchs_own(name: str) -> None:
    x = X.repeat(1, 20, 20)
    torch.manual_seed(0)
    ours, own = drawn(DRAWS[name], list(range(12)), x), DRAWS[name](x)
    assert float(ours.mean()) == pytest.approx(float(own.mean()), abs=0.03)
    assert float(ours.std()) == pytest.approx(float(own.std()), abs=0.03)


def test_gradients_go_through_the_same_mask_twice() -> None:
    x = ONES.clone().requires_grad_()
    y = drawn(lambda x: F.dropout(x, 0.3), list(range(12)), x)
    (gradient,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, 2 * y / (1 - 0.3))
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, 2 * (y > 0).double() / (1 - 0.3) ** 2)


def test_a_generator_of_ones_own_is_left_alone() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.rand(3, generator=torch.Generator().manual_seed(5)) + x.sum() * 0

    torch.testing.assert_close(drawn(function, [0]), drawn(function, [1]))


def test_one_number_is_drawn_for_all_samples() -> None:
    """A dropped layer, or noise on a parameter: the same in every microbatch of the step."""
    weight = nn.Parameter(torch.ones(5, 3, dtype=torch.float64))

    def function(x: Tensor) -> Tensor:
        return torch.rand(()) + F.dropout(weight, 0.5)

    assert torch.equal(drawn(function, [0]), drawn(function, [1, 2, 3]))
