"""Images, histograms and texts: written once, by the right ranks, and read back from trackers."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import events
from paceline.errors import TrainingError
from paceline.events import Event, MediaLogged, Note
from paceline.testing.plugin import Ranks
from paceline.track import CSV, Comet, TensorBoard, WandB
from paceline.track.media import histogram_of, located
from paceline.trainer import media
from run_events import feed

RED = torch.zeros(3, 2, 5)
RED[0] = 1.0


class Calls(paceline.Callback):
    def __init__(self, call: Callable[[paceline.Trainer], None]) -> None:
        self.call = call

    def on_step_end(self, trainer: paceline.Trainer, result: Any) -> None:
        self.call(trainer)


def fit(
    call: Callable[[paceline.Trainer], None],
    folder: Path | None = None,
    steps: int = 1,
    resume: bool = False,
    **options: Any,
) -> paceline.History:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x = torch.randn(8, 4)
    trainer = paceline.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=4,
        run_dir=folder,
        progress=False,
        callbacks=[Calls(call)],
        **options,
    )
    return trainer.fit(TensorDataset(x, x.argmax(1) % 2), steps=steps, resume=resume)


def log_all(trainer: paceline.Trainer) -> None:
    trainer.log_image("samples/first", RED, caption="red")
    trainer.log_text("said", "<b>hello</b> ünïcode")
    trainer.log_histogram("weights", torch.tensor([0.0, 1.0, 1.0, 4.0, math.nan]), bins=4)


def written(folder: Path, kind: str) -> Path:
    [found] = [e for e in events.read(folder) if isinstance(e, MediaLogged) and e.what == kind]
    return folder / found.file


def test_files_in_the_run_folder_and_their_names_in_its_events(tmp_path: Path) -> None:
    history = fit(log_all, tmp_path)
    assert [event.what for event in history.media] == ["image", "text", "histogram"]
    assert history.media == paceline.History.read(tmp_path).media
    assert np.array_equal(np.asarray(Image.open(written(tmp_path, "image")))[0, 0], [255, 0, 0])
    assert written(tmp_path, "text").read_text("utf-8") == "<b>hello</b> ünïcode"
    found = histogram_of(located(history.media[2], tmp_path))  # type: ignore[arg-type]
    assert found.edges == [0, 1, 2, 3, 4]
    assert found.counts == [1, 2, 0, 1]
    assert (found.sum, found.sum_squares, found.not_finite) == (6, 18, 1)
    # A step that is repeated replaces what it wrote.
    fit(log_all, tmp_path, steps=2, resume=True)
    assert len(list((tmp_path / "media").iterdir())) == 6
    assert (tmp_path / "events.jsonl").stat().st_size < 20_000


def all_of(folder: Path) -> list[Event]:
    """The events of a run as its trackers are given them."""
    return [located(event, folder) for event in events.read(folder)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has logged one of each."""
    folder = tmp_path_factory.mktemp("run")
    fit(log_all, folder)
    return folder


def test_tensorboard_shows_them(tmp_path: Path) -> None:
    # Without a run folder: from files that are there until the trackers have read them.
    history = fit(log_all, trackers=[TensorBoard(tmp_path), CSV(tmp_path / "metrics.csv")])
    assert not any(Path(event.file).is_absolute() for event in history.media)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path))
    board.Reload()
    [image] = board.Images("samples/first")
    assert (image.width, image.height, image.encoded_image_string[:4]) == (5, 2, b"\x89PNG")
    [histogram] = board.Histograms("weights")
    assert histogram.histogram_value.bucket == [1, 2, 0, 1]
    [text] = board.Tensors("said/text_summary")
    assert "hello" in text.tensor_proto.string_val[0].decode()
    assert (tmp_path / "metrics.csv").read_text().startswith("step,time,train/loss")


@pytest.mark.filterwarnings("ignore")
def test_wandb_shows_them(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    feed(WandB(mode="offline", run_dir=tmp_path), *all_of(run))
    wandb.teardown()
    [shown] = tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png")
    assert Image.open(shown).size == (5, 2)
    [page] = tmp_path.glob("wandb/offline-run-*/files/media/html/**/*.html")
    assert "&lt;b&gt;hello" in page.read_text("utf-8")
    [log] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b'"histogram"' in log.read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_comet_shows_them(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_API_KEY", "nobody's")
    feed(Comet(mode="offline", run_dir=tmp_path), *all_of(run))
    [archive] = tmp_path.glob("comet/*.zip")
    with zipfile.ZipFile(archive) as opened:
        told = [json.loads(line) for line in opened.read("messages.json").splitlines()]
        texts = [opened.read(name) for name in opened.namelist()]
    kinds = {one["payload"].get("upload_type") for one in told}
    assert {"visualization", "histogram3d"} <= kinds
    assert any(b"<b>hello</b>" in text for text in texts)


def log_on_ranks(trainer: paceline.Trainer) -> None:
    rank = trainer.engine.world.rank
    trainer.log_text("mine", f"rank {rank}")
    if rank == 0:
        trainer.log_image("only", RED)
    trainer.log_histogram("all", torch.full((3,), float(rank)), bins=2, gather=True)
    trainer.log_histogram("first", torch.full((3,), float(rank)), bins=2)
    trainer.log_histogram("parameter", next(iter(trainer.model.parameters())), bins=2)


def on_each_rank(folder: Path) -> int:
    return len(fit(log_on_ranks, folder, layout="dp=2,zero=3").media)


@pytest.mark.world(2)
def test_one_of_each_on_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(on_each_rank, tmp_path) == [5, 0]
    found = {
        event.name: (tmp_path / event.file)
        for event in events.read(tmp_path)
        if isinstance(event, MediaLogged)
    }
    assert found["mine"].read_text() == "rank 0"
    counts = {
        name: json.loads(path.read_text())["counts"]
        for name, path in found.items()
        if path.suffix == ".json"
    }
    assert counts["all"] == [3, 3]
    assert counts["first"] == [0, 3]
    assert sum(counts["parameter"]) == 8


WRONG: list[tuple[Callable[[paceline.Trainer], None], str]] = [
    (lambda t: t.log_image("x", torch.zeros(2, 3, 4)), r"the shape \(2, 3, 4\) is no image"),
    (lambda t: t.log_image("x", torch.zeros(5, 3, 4, 4)), "make one, such as by torchvision"),
    (lambda t: t.log_image("x", torch.zeros(1, 5000, 5000)), "more than 16,777,216"),
    (lambda t: t.log_image("x", "a.png"), "str is no image"),
    (lambda t: t.log_image("", RED), "name='' must be text"),
    (lambda t: t.log_text("x", 3), "got int, not text"),  # type: ignore[arg-type]
    (lambda t: t.log_histogram("x", [1, 2], bins=0), "bins=0 must be 1 to 1024"),
    (lambda t: t.log_histogram("x", "abc"), "str is no tensor"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_is_none_is_refused(call: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        fit(call)


def test_outside_of_a_run_it_is_refused() -> None:
    trainer = paceline.Trainer(nn.Linear(1, 1), global_batch=1)
    with pytest.raises(TrainingError, match="log_text: no run is under way"):
        trainer.log_text("x", "y")


def hostile(trainer: paceline.Trainer) -> None:
    for name in ("../../etc/passwd", "a" * 500, "\x00\n", "ü/ü", "%s{}"):
        trainer.log_text(name, "x" * (media.LONGEST_TEXT + 7))
    trainer.log_histogram("huge", [-1.7e308, 1.7e308, math.inf])
    trainer.log_histogram("empty", [])
    trainer.log_histogram("same", torch.ones(3, dtype=torch.int64))
    trainer.log_image("nan", torch.full((2, 2), math.nan))
    trainer.log_image("array", np.zeros((2, 3, 4), dtype=np.uint8))
    trainer.log_image("large", torch.full((2, 2), 70000))


def test_hostile_names_and_values(tmp_path: Path) -> None:
    history = fit(hostile, tmp_path)
    assert len({event.file for event in history.media}) == 11
    for event in history.media:
        assert (tmp_path / event.file).resolve().parent == tmp_path / "media"
    text = (tmp_path / history.media[0].file).read_text("utf-8")
    assert text.endswith("… (7 more characters were left out)")
    huge = histogram_of(located(history.media[5], tmp_path))  # type: ignore[arg-type]
    assert (sum(huge.counts), huge.not_finite) == (2, 1)
    assert all(map(math.isfinite, huge.edges))


def test_the_folder_is_bounded_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MOST_RUN_BYTES", 25)
    history = fit(lambda t: t.log_text(f"at {t.step}", "ten bytes."), tmp_path, steps=4)
    assert [event.step for event in history.media] == [1, 2]
    [note] = [e for e in events.read(tmp_path) if isinstance(e, Note)]
    assert "images, histograms and texts are not kept from step 3 on" in note.message
