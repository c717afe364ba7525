"""What a run says of its wire when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sync_cases import fit
from torch import nn

import paceline
from paceline import events
from paceline.events import Note
from paceline.options import Compression, LocalSteps
from paceline.sync.traffic import LeftAlone, Traffic
from paceline.trainer.sync_notes import of_compression, of_local_steps
from paceline.trainer.sync_reports import left_alone_note

POWER = Compression("powersgd:4+fp16")


@pytest.mark.parametrize(
    ("done", "last_step", "told"),
    [
        (0, None, "gradients are sent as powersgd:4+fp16 after 100 uncompressed steps "),
        (60, 101, "gradients are sent as powersgd:4+fp16 after 100 uncompressed steps "),
        (100, 150, "gradients are sent as powersgd:4+fp16"),
    ],
)
def test_what_is_on_and_from_when(done: int, last_step: int | None, told: str) -> None:
    note = of_compression(POWER, done, last_step, start=None)
    assert note.level == "info"
    assert note.message.removesuffix("(compress.warmup_steps)") == told


def test_rules_are_part_of_what_is_on() -> None:
    compression = Compression("int8", rules={"head.*": "fp16"})
    assert of_compression(compression, 0, 10, start=None).message == (
        "gradients are sent as int8, fp16"
    )


def test_a_run_that_ends_in_its_warm_up_is_warned() -> None:
    note = of_compression(POWER, 0, 100, start=None)
    assert note.level == "warning"
    assert "no gradient will be sent as powersgd:4+fp16: this run ends after 100 steps" in (
        note.message
    )
    assert "compress.warmup_steps" in note.message
    note = of_compression(POWER, 0, 500, start=50)  # no gradient travels in local steps
    assert note.level == "warning"
    assert "local steps begin after 50 steps" in note.message
    assert "local_steps.start" in note.message


def test_how_often_replicas_meet() -> None:
    local_steps = LocalSteps(every=50, exchange="int8")
    note = of_local_steps(local_steps, 0, 50)
    assert (note.level, note.message) == (
        "info",
        "replicas synchronise every 50 steps (diloco, int8)",
    )
    later = LocalSteps(every=20, method="average", start=40, fragments=4)
    assert of_local_steps(later, 0, None).message == (
        "replicas synchronise every 20 steps (average, 4 fragments in turn) after 40 synchronous steps "
        "(local_steps.start)"
    )


def test_replicas_that_hardly_meet_are_warned() -> None:
    note = of_local_steps(LocalSteps(every=50), 0, 40)
    assert note.level == "warning"
    assert "this run ends after 40 steps: they do so only at its end" in note.message
    note = of_local_steps(LocalSteps(every=5, start=40), 0, 40)
    assert note.level == "warning"
    assert "no step will be local" in note.message


def test_what_travels_as_it_is_is_told_where_it_is_much() -> None:
    small = [LeftAlone(f"norm{n}.bias", 20, "compress.rules") for n in range(6)]
    found = [*small, LeftAlone("emb.weight", 6000, "compress.embeddings")]
    told = left_alone_note(found, 10_000, Traffic(sent=6_200, plain=10_000))
    assert told == (
        "of the 6.2 kB of gradients that a rank sends in a step, 6.1 kB are uncompressed: "
        "emb.weight and 6 smaller tensors (compress.embeddings, compress.rules)"
    )
    assert left_alone_note(small, 10_000, Traffic(sent=2_500, plain=10_000)) is None
    assert left_alone_note([], 10_000, Traffic(sent=2_500, plain=10_000)) is None


class Words(nn.Module):
    """A net that is mostly an embedding: 25,600 of 29,728 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(400, 64)
        self.first = nn.Linear(64, 32)
        self.second = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(self.emb(x)))
        return out


def train(run_dir: str, steps: int, options: dict[str, Any]) -> list[str]:
    """The notes of a run, as this rank knows them."""
    torch.manual_seed(0)
    model = Words()
    data = torch.utils.data.TensorDataset(torch.arange(32), torch.zeros(32, 64))
    fit(model, data, run_dir, steps, save_every=2, **options)
    told = [e.message for e in events.read(Path(run_dir)) if isinstance(e, Note)]
    return [message for message in told if "starts from the beginning" not in message]


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2"])
def test_a_run_tells_once_what_is_on_and_why_it_saves_little(
    ranks: Any, tmp_path: Path, layout: str
) -> None:
    compress = paceline.Compression("topk:0.01", warmup_steps=1)
    [told, _] = ranks(train, str(tmp_path), 4, {"compress": compress, "layout": layout})
    assert (
        told[0]
        == "gradients are sent as topk:0.01 after 1 uncompressed step (compress.warmup_steps)"
    )
    assert "emb.weight and 2 smaller tensors (compress.embeddings, compress.rules)" in told[1]
    assert len(told) == 2


@pytest.mark.world(2)
def test_nothing_more_is_told_where_all_is_compressed(ranks: Any, tmp_path: Path) -> None:
    compress = paceline.Compression("int8", embeddings=True)
    [told, _] = ranks(train, str(tmp_path), 4, {"compress": compress})
    assert told == ["gradients are sent as int8"]


def test_a_single_rank_says_that_nothing_travels(tmp_path: Path) -> None:
    [told] = train(str(tmp_path), 2, {"compress": "int8"})
    assert "there is one data-parallel rank" in told


def test_what_was_left_is_told_on_another_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    options = {"compress": paceline.Compression("topk:0.01", warmup_steps=0)}
    before = ranks(train, str(tmp_path), 2, options, world_size=3)[0]
    again = ranks(train, str(tmp_path), 4, options, world_size=3)[0]
    assert not any("before" in message for message in again[len(before) :])
    after = ranks(train, str(tmp_path), 6, options, world_size=2)[0][len(again) :]
    assert (
        "compressed gradients: 3 data-parallel ranks before, 2 now: every rank goes on with the "
        "mean of what all had not sent yet, so that nothing is lost and nothing counts twice"
    ) in after
