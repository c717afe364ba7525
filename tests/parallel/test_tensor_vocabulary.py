"""A vocabulary spread over ranks, evenly or not: whatever a loss does with the logits is right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from paceline.models.gpt import GPT
from paceline.parallel.tensor import (
    TensorPlan,
    apply_plan,
    full_tensor,
    make_plan,
    mixing,
    plain,
)
from parallel import tensor_cases as cases

TOKENS = torch.arange(16).view(2, 8) * 7 % 257
TARGETS = (TOKENS + 3) % 256
PADDED = TARGETS.masked_fill(TOKENS % 5 == 0, -100)


def probabilities(logits):
    return torch.linspace(0, 1, logits.numel(), dtype=logits.dtype).view(logits.shape).softmax(-1)


def written_into_zeros(logits):
    zeros = torch.zeros(logits.shape, dtype=logits.dtype)
    zeros.add_(logits)
    return zeros.pow(2).sum()


def changed_in_place(logits):
    copied = logits.clone()
    copied[:, 0] = 0.0
    copied.mul_(2)
    return copied.pow(2).sum()


LOSSES = {
    "cross_entropy": lambda y: F.cross_entropy(y.flatten(0, 1), PADDED.flatten()),
    "module": lambda y: nn.CrossEntropyLoss()(y.view(-1, y.size(-1)), PADDED.view(-1)),
    "smoothed": lambda y: F.cross_entropy(
        y.flatten(0, 1), PADDED.flatten(), label_smoothing=0.1, reduction="sum"
    ),
    "each": lambda y: F.cross_entropy(y.mT, PADDED, reduction="none").pow(2).sum(),
    "one sample": lambda y: F.cross_entropy(y[0, 4], TARGETS[0, 4]),
    "shifted": lambda y: F.cross_entropy(
        y[:, :-1].float().double().reshape(-1, y.shape[-1]), TARGETS[:, 1:].reshape(-1)
    ),
    "weighted": lambda y: F.cross_entropy(
        y.flatten(0, 1), PADDED.flatten(), weight=torch.linspace(1, 2, y.shape[-1]).double()
    ),
    "probabilities": lambda y: F.cross_entropy(y.flatten(0, 1), probabilities(y).flatten(0, 1)),
    "nll": lambda y: F.nll_loss(y.log_softmax(-1).flatten(0, 1), PADDED.flatten()),
    "gathered": lambda y: (y.logsumexp(-1) - y.gather(-1, TARGETS[..., None])[..., 0]).mean(),
    "divergence": lambda y: F.kl_div(y.log_softmax(-1), probabilities(y), reduction="batchmean"),
    "largest": lambda y: y.topk(3).values.sum() + y.amax() * float(y.detach().abs().max()),
    "selected": lambda y: F.cross_entropy(y[PADDED != -100], PADDED[PADDED != -100]),
    "statistics": lambda y: y.mean() + y.var(-1).sum() + y.std() + (y.argmax(-1) == 3).sum(),
    "capped": lambda y: F.cross_entropy((5 * torch.tanh(y / 5)).flatten(0, 1), PADDED.flatten()),
    "into zeros": written_into_zeros,
    "in place": changed_in_place,
}


@pytest.mark.world(2)
@pytest.mark.parametrize("vocab", [257, 256])
def test_any_loss_of_split_logits(ranks, vocab):
    def job():
        mesh = cases.tp_mesh()
        torch.manual_seed(0)
        whole = GPT(vocab_size=vocab, context=8, layers=1, heads=2, width=16).double()
        split = copy.deepcopy(whole)
        plan = make_plan(split, 2, sample=lambda m: LOSSES["cross_entropy"](m(TOKENS % vocab)))
        apply_plan(split, plan, mesh)
        wrong = {}
        for name, loss in LOSSES.items():
            expected = loss(whole(TOKENS % vocab))
            with mixing(mesh):
                logits = split(TOKENS % vocab)
                got = plain(loss(logits))
            assert isinstance(logits, DTensor)
            assert type(got) is torch.Tensor
            expected.backward()
            got.backward()
            differences = [cases.relative(got.detach(), expected.detach())]
            for a, b in zip(whole.parameters(), split.parameters(), strict=True):
                differences.append(cases.relative(full_tensor(b.grad), a.grad))
            if not max(differences) < 1e-9:
                wrong[name] = max(differences)
            whole.zero_grad()
            split.zero_grad()
        return wrong

    assert ranks(job, timeout=120) == [{}, {}]


@pytest.mark.world(4)
def test_embedding_with_padding_and_fewer_rows_than_a_rank_could_hold(ranks):
    def job():
        mesh = cases.tp_mesh()
        for rows, padding in [(5, 0), (5, 4), (4, -1), (6, None), (2, 1)]:
            torch.manual_seed(0)
            whole = nn.Sequential(nn.Embedding(rows, 3, padding_idx=padding)).double()
            split = copy.deepcopy(whole)
            apply_plan(split, TensorPlan(4, {"0": "vocabulary"}), mesh)
            index = torch.arange(2 * rows).view(2, rows) % rows
            expected, got = whole(index), split(index)
            assert torch.equal(got, expected)
            expected.pow(3).sum().backward()
            got.pow(3).sum().backward()
            assert torch.equal(full_tensor(split[0].weight.grad), whole[0].weight.grad)
        with pytest.raises(IndexError, match=r"found 0\.\.2, the table has 2 rows"):
            split(torch.tensor([0, 2]))

    ranks(job)


@pytest.mark.world(2)
def test_outputs_become_plain_and_whole(ranks):
    def job():
        mesh = cases.tp_mesh()
        model, batches, _ = cases.case("llama")
        batch = batches()
        with cases.double():
            expected = model(**batch)
        apply_plan(model, make_plan(model, 2), mesh)
        with cases.double(), mixing(mesh), torch.no_grad():
            split = model(**batch)
            whole = plain({"output": split, "pair": (split.logits, 3), "rest": ["x", None]})
        assert isinstance(split.logits, DTensor)
        assert type(whole["output"]) is type(split)
        for logits in (whole["output"].logits, whole["pair"][0]):
            assert type(logits) is torch.Tensor
            assert cases.relative(logits, expected.logits) < 1e-12
        assert whole["rest"] == ["x", None]
        untouched = {"a": torch.ones(1)}
        assert plain(untouched) is untouched

    ranks(job, timeout=60)
