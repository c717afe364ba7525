"""``--backend``: which library a script is written for, from the command line to the rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.train import train as command
from paceline.compat.backends import BACKENDS, prepare_rank
from paceline.errors import ConfigError
from paceline.launch.engines import ClusterJob
from paceline.launch.engines.ray import _backend


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["paceline", "train", *arguments])
    try:
        main()
    except SystemExit as leaving:
        return leaving.code
    return 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--backend", "horovod"],
            "--backend horovod: for scripts only, which it says how to run; name one with --script "
            "FILE. Where a config's ranks compute is launch.device, as in --set launch.device=cpu",
        ),
        (
            ["--script", "s.py", "--backend", "horovd"],
            f"--backend horovd: there is no such backend; use {', '.join(BACKENDS)}: the library "
            "that the script is written for",
        ),
        (
            ["--script", "s.py", "--backend=nccl"],
            "--backend=nccl: of another launcher; here that is: paceline train --script s.py --set "
            "launch.device=cuda (on GPUs ranks talk over NCCL)",
        ),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("print(1)")
    assert typed(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err.strip() == said


def test_the_help_names_every_backend() -> None:
    options = command.__annotations__["backend"]
    for name in BACKENDS:
        assert name in str(options)


def test_engines_hand_it_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "s.py"
    script.write_text("print(1)")
    given = ["--script", "s.py", "--backend", "horovod", "--dry-run"]
    assert typed(monkeypatch, *given, "--on", "ssh", "--hosts", "a:2,b:2", "--", "--lr", "1") == 0
    assert f"--script {script} --backend horovod" in capsys.readouterr().out
    assert typed(monkeypatch, *given, "--on", "slurm") == 0
    assert "--backend horovod" in capsys.readouterr().out


def test_ray_hands_it_on() -> None:
    job = ClusterJob.__new__(ClusterJob)
    object.__setattr__(job, "train", ("--script", "/s.py", "--backend", "horovod"))
    assert _backend(job) == "horovod"
    object.__setattr__(job, "train", ("--script", "/s.py", "--set", "launch.nproc=2"))
    assert _backend(job) is None


def test_a_rank_refuses_an_unknown_one() -> None:
    with pytest.raises(ConfigError, match="there is no such backend"):
        prepare_rank("horovd")
    prepare_rank("torch")


IMPORTS = """
import os, subprocess, sys
from paceline.compat.backends import prepare_rank
prepare_rank("horovod")
import horovod
import horovod.alias as alias
import paceline.compat.horovod as ours
import paceline.compat.horovod.alias
assert horovod is ours and alias is paceline.compat.horovod.alias
assert horovod.__spec__.name == "paceline.compat.horovod", horovod.__spec__
for name in ("horovod.tensorflow.keras", "horovod.nothing"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error)
child = "import horovod, sys; print(horovod.__name__)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip())
"""


def test_import_horovod_is_ours_here_and_in_child_processes(tmp_path: Path) -> None:
    """An installed Horovod is stepped over, with one line that says so."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise SystemExit('the installed one')")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == [
        "No module named 'horovod.tensorflow' among Paceline's modules for Horovod scripts: for "
        "TensorFlow and Keras use --backend tensorflow.",
        "No module named 'horovod.nothing' among Paceline's modules for Horovod scripts: see the "
        "guide 'Horovod scripts' for the modules that are.",
        "paceline.compat.horovod",
    ], done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith(f"--backend horovod: the Horovod installed in {tmp_path}/horovod is not")
