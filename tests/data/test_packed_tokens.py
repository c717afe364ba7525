"""Token files packed to full sequences: nothing lost, little wasted, documents kept apart."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.data import PackedTokens, loader
from paceline.errors import DataError
from paceline.models.gpt import GPT, token_cross_entropy

END = 0


def write(folder: Path, files: list[list[int]]) -> list[list[int]]:
    """Files of documents with these lengths, numbered through; returns the documents."""
    documents, at = [], 1
    for number, lengths in enumerate(files):
        tokens: list[int] = []
        for length in lengths:
            documents.append([*range(at, at + length - 1), END])
            tokens += documents[-1]
            at += length
        np.save(folder / f"{number}.npy", np.array(tokens, np.int32))
    return documents


def predicted(data: PackedTokens) -> list[tuple[int, int]]:
    """All pairs of a token and the one it is to predict."""
    pairs = []
    for index in range(len(data)):
        tokens, positions, documents, targets = (part.tolist() for part in data[index])
        starts: dict[int, int] = {}
        for at, document in enumerate(documents):
            if document < 0:
                assert targets[at] == -100
                continue
            assert positions[at] == at - starts.setdefault(document, at)
            if targets[at] != -100:
                pairs.append((tokens[at], targets[at]))
    return pairs


@settings(max_examples=40, deadline=None)
@given(
    files=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=1, max_size=4),
    context=st.integers(1, 16),
    whole=st.booleans(),
)
def test_every_token_is_predicted_once_within_its_document(
    tmp_path_factory: Any, files: list[list[int]], context: int, whole: bool
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    documents = write(folder, files)
    data = PackedTokens(f"{folder}/*.npy", context, end=END, whole=whole)
    wanted = [pair for text in documents for pair in pairwise(text)]
    found = predicted(data)
    assert sorted(found) == sorted(wanted)
    if not whole:
        assert found == wanted
        assert len(data) * context - data.tokens < context
        return
    cut = [text for text in documents if len(text) > context]
    allowed = [text[at : at + context] for text in cut for at in range(0, len(text), context)]
    for index in range(len(data)):  # whole: only what is longer than a sequence is cut
        tokens, _, numbers, _ = data[index]
        for number in range(int(numbers.max()) + 1):
            piece = tokens[numbers == number].tolist()
            assert piece in documents or piece in allowed


def test_little_is_wasted(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 1.2, 4000).astype(int) + 1
    write(tmp_path, [lengths.tolist()])
    cut = PackedTokens(tmp_path / "0.npy", 512, end=END)
    whole = PackedTokens(tmp_path / "0.npy", 512, end=END, whole=True)
    assert 0 <= cut.waste < 0.01
    assert 0 <= whole.waste < 0.01
    full = sum(int((whole[at].documents >= 0).sum()) for at in range(len(whole)))
    assert full == whole.tokens == lengths.sum()
    assert whole.waste == pytest.approx(1 - full / (len(whole) * 512))


def test_a_document_in_a_pack_is_as_if_alone() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=50, context=12, layers=2, heads=2, width=16).double()
    documents = [torch.randint(50, (length,)) for length in (5, 4, 3)]
    alone = torch.cat([model(text[None])[0] for text in documents])
    numbers = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    places = torch.cat([torch.arange(len(text)) for text in documents])[None]
    packed = model(torch.cat(documents)[None], places, numbers)[0]
    assert torch.allclose(packed, alone, atol=1e-12)
    assert torch.equal(model(documents[0][None]), model(documents[0][None], places[:, :5]))


@pytest.mark.world(2)
def test_packed_sequences_train_alike_on_every_layout(ranks: Any, tmp_path: Path) -> None:
    write(tmp_path, [[3, 9, 2, 20, 7, 11] * 2])

    def job(layout: str) -> list[float]:
        torch.manual_seed(0)
        model = GPT(vocab_size=200, context=8, layers=2, heads=2, width=16)
        data = PackedTokens(tmp_path / "0.npy", 8, end=END)
        trainer = paceline.Trainer(
            model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            loss=token_cross_entropy,
            layout=layout,
            precision="fp64",
            global_batch=4,
            progress=False,
        )
        return trainer.fit(data, steps=3).losses

    alone = ranks(job, "dp=1", world_size=1)[0]
    for layout in ("dp=2,zero=3", "tp=2", "pp=2"):
        assert ranks(job, layout)[0] == pytest.approx(alone, rel=1e-9), layout


def test_raw_numbers_and_workers(tmp_path: Path) -> None:
    np.arange(1, 41, dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = PackedTokens([tmp_path / "a.bin"], 8)
    assert len(pickle.dumps(data)) < 2000
    options: dict[str, Any] = dict(global_batch=3, rank=0, size=1)
    with loader(data, workers=2, **options) as one, loader(data, **options) as other:
        for ours, theirs in zip(one, other, strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"a.bin has 3 bytes, which is no whole number of uint16"):
        PackedTokens(tmp_path / "a.bin", 8)
    with pytest.raises(DataError, match="dtype='float32' must be a type of whole numbers"):
        PackedTokens(tmp_path / "a.bin", 8, dtype="float32")
    np.save(tmp_path / "b.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"b.npy holds float64 of shape \(2, 2\)"):
        PackedTokens(tmp_path / "b.npy", 8)
    (tmp_path / "c.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"c.npy is no .npy file"):
        PackedTokens(tmp_path / "c.npy", 8)
    (tmp_path / "d.bin").write_bytes(b"")
    with pytest.raises(DataError, match="hold no token"):
        PackedTokens(tmp_path / "d.bin", 8)
