"""Checks against the machine: GPUs, compilers, packages (all others are in wrong_configs.txt)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from paceline.config import check, count_gpus, devices, load


def problems(*overrides: str, gpus: int) -> list[str]:
    return check(load(None, overrides), devices=gpus)


def test_more_ranks_than_gpus() -> None:
    assert problems("launch.nproc=4", gpus=2) == [
        "--set launch.nproc=4: 4 ranks need 4 GPUs, but this machine has 2; set launch.nproc to "
        "2 or less, or launch.device to cpu; for a test, launch.share_gpu=true lets them share"
    ]
    assert problems("layout=dp=3", gpus=2) == [
        "--set layout=dp=3: 3 ranks need 3 GPUs, but this machine has 2; set launch.nproc to "
        "2 or less, or launch.device to cpu; for a test, launch.share_gpu=true lets them share"
    ]
    assert problems("launch.nproc=4", gpus=4) == []
    assert problems("launch.nproc=4", gpus=0) == []
    assert problems("launch.nproc=4", "launch.device=cpu", gpus=2) == []


@pytest.mark.parametrize(
    ("overrides", "gpus", "words"),
    [
        (("launch.nproc=4",), 1, None),
        (("layout=dp=2,tp=2",), 2, None),
        (("launch.device=cpu", "launch.nproc=4"), 1, "with launch.device=cpu: there is no GPU"),
        (("launch.nproc=4",), 0, "needs a GPU, but torch can use none on this machine"),
        (
            ("launch.nnodes=2", "launch.rdzv=h:1", "launch.nproc=4"),
            1,
            "is for tests on one machine, but launch.nnodes=2",
        ),
        (("launch.nproc=2",), 4, "has nothing to do: each of 2 ranks has a GPU of its own, of 4"),
        (("launch.nproc=1",), 1, "has nothing to do: the rank has a GPU of its own, of 1"),
    ],
)
def test_ranks_share_a_gpu_where_that_makes_sense(
    overrides: tuple[str, ...], gpus: int, words: str | None
) -> None:
    found = problems(*overrides, "launch.share_gpu=true", gpus=gpus)
    if words is None:
        assert found == []
    else:
        start = f"--set launch.share_gpu=true: launch.share_gpu=true {words}"
        assert [text[: len(start)] for text in found] == [start]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_every_precision_runs_on_the_cpu(precision: str) -> None:
    assert problems(f"precision={precision}", gpus=0) == []


def test_compiling_on_the_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert problems("compile=true", gpus=0) == [
        "--set compile=true: compile=true needs a C++ compiler on the CPU, and "
        "'no-such-compiler -O2' is not found; install g++, name another in $CXX, or set compile "
        "to false"
    ]
    assert problems("compile=true", gpus=1) == []


def test_pinned_memory_goes_with_a_gpu() -> None:
    assert problems("data.pin_memory=true", gpus=1) == []
    assert len(problems("data.pin_memory=true", gpus=0)) == 1


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_tracker_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted: None if wanted == name else found(wanted)
    )
    assert problems(f"track.{name}=true", gpus=0) == [
        f"--set track.{name}=true: track.{name}: {name} is not installed; "
        f"pip install 'paceline[{name}]'"
    ]


def test_a_run_folder_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert problems(f"track.run_dir={tmp_path}/a/b", gpus=0) == [
        f"--set track.run_dir={tmp_path}/a/b: track.run_dir='{tmp_path}/a/b': the folder "
        f"'{tmp_path}' may not be written to"
    ]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,3", 2),
        ("0,-1,1", 1),
        ("0,9,1", 1),
        ("GPU-8932f937,MIG-12345", 2),
        (" 1 , 2 ", 2),
    ],
)
def test_counting_gpus_honours_cuda_visible_devices(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "_gpus_present", lambda: 4)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_a_torch_without_cuda_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: False)
    monkeypatch.setattr(devices, "_gpus_present", lambda: 4)
    assert count_gpus() == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = None\n", False),
        ("cuda = None\n", False),
        ("cuda = '13.0'\n", True),
        ("__version__ = 'x'\n", True),
        (None, True),
    ],
)
def test_the_version_file_of_torch_tells_of_cuda(
    text: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    if text is not None:
        (tmp_path / "torch" / "version.py").write_text(text)
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert devices.torch_has_cuda() is expected


def test_the_installed_torch_agrees_with_its_version_file() -> None:
    import torch

    assert devices.torch_has_cuda() == (torch.version.cuda is not None)
    assert count_gpus() == torch.cuda.device_count()
