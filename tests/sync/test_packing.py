"""What goes onto the wire comes off it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sync.compressed import packing, quantise
from paceline.sync.compressed import topk as sparse

SIZES = [1, 7, 8, 1023, 1024, 1025, 65535, 65536, 65537, 200_001]


def numbers(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=dtype)


@pytest.mark.parametrize("size", SIZES)
def test_signs_take_a_bit_each(size: int) -> None:
    values = numbers(size)
    packed = packing.pack_signs(values)
    assert packed.numel() == -(-size // 8)
    back = packing.unpack_signs(packed, size, torch.float32)
    assert torch.equal(back, torch.where(values >= 0, 1.0, -1.0))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300_000), st.floats(0.0001, 1.0))
def test_positions_take_two_bytes_each(size: int, ratio: float) -> None:
    count = sparse.how_many(size, ratio)
    positions = torch.randperm(size)[:count].sort().values
    packed = packing.pack_positions(positions, size)
    assert packed.numel() == packing.packed_positions_size(count, size)
    assert torch.equal(packing.unpack_positions(packed, count, size), positions)


@pytest.mark.parametrize("size", [*SIZES, 3_000_000])
def test_the_largest_are_those_that_a_full_sort_finds(size: int) -> None:
    values = numbers(size)
    count = sparse.how_many(size, 0.01)
    expected = values.abs().topk(count).values.sort().values
    found = sparse.largest(values, count)
    assert torch.equal(found, found.unique())
    assert torch.equal(values[found].abs().sort().values, expected)


def test_the_largest_of_equal_numbers_are_as_many_as_were_asked_for() -> None:
    assert sparse.largest(torch.ones(1_000_000), 10_000).numel() == 10_000
    assert sparse.largest(torch.zeros(1_000_000), 10_000).numel() == 10_000


def test_all_ranks_draw_the_same_positions_and_others_with_another_seed() -> None:
    device = torch.device("cpu")
    drawn = sparse.drawn(100_000, 1000, 7, device)
    assert torch.equal(drawn, sparse.drawn(100_000, 1000, 7, device))
    assert torch.equal(drawn, drawn.unique())
    assert drawn.max() < 100_000
    assert not torch.equal(drawn, sparse.drawn(100_000, 1000, 8, device))


def test_every_position_is_drawn_equally_often() -> None:
    counts = torch.zeros(100)
    for seed in range(2000):
        counts[sparse.drawn(100, 10, seed, torch.device("cpu"))] += 1
    # 200 draws each expected; 6 standard deviations of a binomial with p = 0.1.
    assert (counts - 200).abs().max() < 6 * (2000 * 0.1 * 0.9) ** 0.5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_off_by_half_a_step_of_its_block_at_most(size: int, dtype: torch.dtype) -> None:
    values = numbers(size, dtype) * torch.logspace(-6, 6, size, dtype=dtype)
    codes, scales = quantise.to_int8(values)
    back = quantise.from_int8(codes, scales, dtype)
    steps = scales.repeat_interleave(quantise.INT8_BLOCK)[:size].to(dtype)
    assert torch.all((values - back).abs() <= steps * 0.5001)  # scales are float32


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(5000)
    assert torch.equal(quantise.from_int8(*quantise.to_int8(zeros), torch.float32), zeros)
    assert torch.equal(quantise.from_signs(*quantise.to_signs(zeros), 5000, torch.float32), zeros)


@pytest.mark.parametrize("size", SIZES)
def test_signs_keep_the_mean_size_of_each_block(size: int) -> None:
    values = numbers(size)
    back = quantise.from_signs(*quantise.to_signs(values), size, torch.float32)
    for start in range(0, size, quantise.SIGN_BLOCK):
        block = slice(start, start + quantise.SIGN_BLOCK)
        torch.testing.assert_close(back[block].abs().mean(), values[block].abs().mean())
    assert torch.equal(back >= 0, values >= 0)


@pytest.mark.parametrize(
    ("form", "block"),
    [(quantise.to_int8, quantise.INT8_BLOCK), (quantise.to_signs, quantise.SIGN_BLOCK)],
)
def test_what_is_not_finite_is_not_lost(form, block: int) -> None:
    values = torch.ones(3 * block - 7)
    values[block + 5] = torch.nan
    _, scales = form(values)
    assert scales.isnan().tolist() == [False, True, False]
