"""Where a proof runs: decided without a GPU, for machines that have some."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.config import load
from paceline.errors import ConfigError
from paceline.options import DataOptions
from paceline.prove import devices
from paceline.prove.cases import Case
from paceline.prove.subject import Subject, given
from paceline.testing import make_mlp, make_vectors

SMALL, LARGE = Case.parse("dp=2"), Case.parse("dp=2,tp=2")


@pytest.mark.parametrize(
    ("device", "share", "gpus", "expected"),
    [
        ("auto", False, 0, "cpu"),
        ("cpu", False, 8, "cpu"),
        ("auto", False, 4, "cuda"),  # what the run would use
        ("cuda", False, 4, "cuda"),
        ("auto", True, 1, "cuda"),
        ("cuda", True, 2, "cuda"),
    ],
)
def test_where_it_is_proven(device: str, share: bool, gpus: int, expected: str) -> None:
    place = devices.choose(device, [SMALL, LARGE], share_gpu=share, gpus=gpus)
    assert place.kind == expected
    assert place.note is None
    assert place.shares(4) == (expected == "cuda" and gpus < 4)
    assert not place.shares(1)


def test_auto_on_too_few_gpus_is_the_cpu_and_says_so() -> None:
    place = devices.choose("auto", [SMALL, LARGE], gpus=2)
    assert place.kind == "cpu"
    assert place.note == (
        "on the CPU: dp=2,tp=2 takes 4 GPUs, but this machine has 2; with --share-gpu the ranks "
        "share"
    )


@pytest.mark.parametrize(
    ("device", "share", "gpus", "words"),
    [
        ("tpu", False, 1, "device=tpu must be one of auto, cpu, cuda"),
        ("cuda", False, 0, "device=cuda, but torch can use no GPU on this machine; use cpu"),
        ("cuda", False, 2, "device=cuda: dp=2,tp=2 takes 4 GPUs, but this machine has 2; let"),
        ("cpu", True, 1, "share_gpu with device=cpu: there is no GPU to share"),
        ("auto", True, 0, "share_gpu needs a GPU, but torch can use none"),
        ("auto", True, 4, "share_gpu has nothing to do: no layout has more than 4 ranks"),
    ],
)
def test_what_cannot_be_is_refused(device: str, share: bool, gpus: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        devices.choose(device, [SMALL, LARGE], share_gpu=share, gpus=gpus)
    assert str(caught.value).startswith(words)


def test_a_config_says_what_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    shared = load(None, ["launch.share_gpu=true"])
    assert devices.choose_for(shared, "auto", [SMALL]).kind == "cuda"
    assert devices.choose_for(shared, "auto", [Case.parse("dp=1")]).kind == "cuda"
    assert devices.choose_for(shared, "cpu", [SMALL]).kind == "cpu"
    on_cpu = load(None, ["launch.device=cpu"])
    assert devices.choose_for(on_cpu, "auto", [Case.parse("dp=1")]).kind == "cpu"
    assert devices.choose_for(on_cpu, "cuda", [Case.parse("dp=1")]).kind == "cuda"


@pytest.mark.parametrize(("precision", "compiled"), [("fp64", False), ("bf16", True)])
def test_in_its_own_precision_the_run_is_compiled_as_it_is(precision: str, compiled: bool) -> None:
    payload = given(
        make_mlp(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        nn.CrossEntropyLoss(),
        make_vectors(8),
        DataOptions(),
        {"compile": True},
    )
    built = Subject(payload, 4, 0, 1, precision).build()
    assert built.options["compile"] is compiled
