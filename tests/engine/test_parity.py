"""Any number of ranks and any accumulation computes what one process on the whole batch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from engine import parity_cases
from engine.parity_cases import CASES, GLOBAL_BATCHES


def train(name: str, dtype: torch.dtype, accumulation: int) -> Any:
    """Five engine steps on this rank."""
    case = CASES[name]
    world = paceline.World.current()
    model = parity_cases.build(case, dtype)
    engine = paceline.Engine(
        model,
        loss=case.loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        clip_norm=0.5,
        precision="fp64" if dtype == torch.float64 else "fp32",
        microbatch=parity_cases.microbatch_for(GLOBAL_BATCHES[0], world.size, accumulation),
        sync_batchnorm=case.batchnorm,
    )
    losses, norms = [], []
    for step, size in enumerate(GLOBAL_BATCHES):
        start, stop = parity_cases.bounds(size, world.size)[world.rank]
        batch = parity_cases.whole_batch(case, step, dtype)
        share = parity_cases.tree(batch, lambda t, a=start, b=stop: t[a:b])
        result = engine.step(share)
        assert result.samples == size
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms, {k: v.clone() for k, v in model.state_dict().items()}


def assert_parity(got: Any, expected: Any, rtol: float, atol: float) -> None:
    losses, norms, state = got
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(expected[0]), rtol=rtol, atol=atol
    )
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected[1]), rtol=rtol, atol=atol)
    torch.testing.assert_close(state, expected[2], rtol=rtol, atol=atol)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.world(1, 2, 3, 4)
def test_float64_equals_one_process_to_rounding(ranks: Any, name: str, accumulation: int) -> None:
    size = ranks.world_size
    microbatch = parity_cases.microbatch_for(GLOBAL_BATCHES[0], size, accumulation)
    expected = parity_cases.reference(CASES[name], torch.float64, ranks=size, microbatch=microbatch)
    for got in ranks(train, name, torch.float64, accumulation):
        assert_parity(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.world(3)
def test_float32_equals_one_process_within_adams_amplification(ranks: Any, name: str) -> None:
    # Sums taken in another order differ by about 1e-7 of the gradient. Adam divides by the root
    # of the second moment, so an element whose gradient is itself rounding noise (a bias before a
    # batch norm has none but that) may move by a whole learning rate, 1e-2, in either direction.
    # Such elements hardly touch the loss: it is held to 5e-4, what five such steps were seen to do.
    microbatch = parity_cases.microbatch_for(GLOBAL_BATCHES[0], ranks.world_size, 3)
    expected = parity_cases.reference(
        CASES[name], torch.float32, ranks=ranks.world_size, microbatch=microbatch
    )
    got = ranks(train, name, torch.float32, 3)[0]
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(expected[0]), rtol=5e-4, atol=0)
    for key, value in got[2].items():
        if value.is_floating_point():
            off = (value - expected[2][key]).abs()
            assert off.max() <= 2 * 1e-2 * len(GLOBAL_BATCHES), key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.world(3)
def test_same_layout_twice_is_equal_to_the_bit(ranks: Any, name: str) -> None:
    first, second = (ranks(train, name, torch.float32, 3)[0] for _ in range(2))
    assert first[:2] == second[:2]
    for key, value in first[2].items():
        assert torch.equal(value, second[2][key]), key


@pytest.mark.world(3)
def test_all_ranks_end_with_the_same_parameters(ranks: Any) -> None:
    results = ranks(train, "resnet", torch.float32, 1)
    for _, _, state in results[1:]:
        for key, value in results[0][2].items():
            assert torch.equal(value, state[key]), key
