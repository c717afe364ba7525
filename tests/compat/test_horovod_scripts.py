"""Scripts in the way of Horovod's own: the same losses on several ranks as on one.

``benchmarks/compat_scripts.py`` runs all of them through the launcher; here they run in the pool of
ranks, and the one whose rank is killed through the launcher.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.compat.horovod import alias

EXAMPLES = Path(__file__).parents[2] / "examples" / "horovod"
# Ranks add gradients and losses in another order than one process does: in float32 that is a
# difference in the seventh digit, which the steps of these scripts carry into the fifth.
CLOSE = 1e-4


def script(name: str, arguments: list[str], folder: str) -> str:
    """What a rank prints that runs the script, with ``import horovod`` as ``--backend`` has it."""
    import paceline.compat.horovod.torch as hvd

    os.chdir(folder)
    alias.install()
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        hvd.shutdown()
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, alias.HorovodFinder)]
        for module in [m for m in sys.modules if m.partition(".")[0] == "horovod"]:
            del sys.modules[module]
    return printed.getvalue()


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\d+\.\d+)", text)]


def scaled(ranks: int) -> dict[str, list[str]]:
    """The arguments with which a script computes the same on any number of ranks."""
    rate = ["--lr", str(0.08 / ranks)]
    return {
        "digits.py": ["--batch-size", str(32 // ranks), "--epochs", "1", *rate],
        "warmup_resume.py": [
            *("--batch-size", str(16 // ranks), "--base-lr", str(0.04 / ranks)),
            *("--warmup-epochs", "0", "--epochs", "2"),
        ],
        "synthetic_benchmark.py": ["--num-iters", "2"],
        "elastic.py": ["--batch-size", str(32 // ranks), *rate, "--epochs", "2"],
        "adasum.py": ["--same-data", "--steps", "10"],
    }


def every_script(folder: str) -> dict[str, str]:
    ranks = int(os.environ["WORLD_SIZE"])
    # Its rate depends on the number of ranks, as that of the script it is like.
    fixed = {"synthetic_benchmark.py"}
    return {
        name: script(name, arguments, folder)
        for name, arguments in scaled(ranks).items()
        if name not in fixed or ranks == 2
    }


def test_the_same_losses_as_one_process(rank_pool: Any, tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        every = rank_pool.run(every_script, str(folder), world_size=ranks, join=False)
        assert not any("loss" in text for other in every[1:] for text in other.values())
        found[ranks] = {name: losses(text) for name, text in every[0].items()}
    assert (
        "last loss"
        in rank_pool.run(
            script, "synthetic_benchmark.py", [], str(tmp_path), world_size=1, join=False
        )[0]
    )
    for ranks in (2, 4):
        for name, expected in found[1].items():
            assert expected
            assert found[ranks][name] == pytest.approx(expected, rel=CLOSE), (name, ranks)


def resumed(folder: str) -> list[str]:
    options = ["--batch-size", "8", "--warmup-epochs", "0"]
    whole = script("warmup_resume.py", [*options, "--epochs", "3"], folder)
    if os.environ["RANK"] == "0":
        os.unlink("checkpoint-3.pt")
        os.unlink("checkpoint-2.pt")
    rest = script("warmup_resume.py", [*options, "--epochs", "3"], folder)
    return [whole, rest]


def test_resuming_from_rank_0s_checkpoint(rank_pool: Any, tmp_path: Path) -> None:
    whole, rest = rank_pool.run(resumed, str(tmp_path), world_size=2, join=False)[0]
    assert losses(rest) == losses(whole)[1:]
    assert len(losses(rest)) == 2


@pytest.mark.waits
def test_a_killed_rank_costs_the_batches_since_the_last_commit(
    rank_pool: Any, tmp_path: Path
) -> None:
    """Through the launcher: kill -9 of a rank in epoch 2, which goes on from its sixth batch."""
    arguments = ["--batch-size", "16", "--lr", "0.02", "--epochs", "2"]
    folder = tmp_path / "alone"
    folder.mkdir()
    expected = rank_pool.run(
        script, "elastic.py", arguments, str(folder), world_size=2, join=False
    )[0]
    command = ["--script", str(EXAMPLES / "elastic.py"), "--backend", "horovod", "--nproc", "2"]
    command += ["--max-restarts", "1", "--run-dir", "run", "--", *arguments, "--kill", "1:2:7"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"from epoch .*", done.stdout) == [
        "from epoch 1 batch 0",
        "from epoch 2 batch 6",
    ]
    assert losses(done.stdout)[0] == losses(expected)[0]
    assert losses(done.stdout)[1] == pytest.approx(losses(expected)[1], rel=CLOSE)
    assert "killed by SIGKILL" in done.stderr
