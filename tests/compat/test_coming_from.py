"""The scripts of the coming-from pages: theirs with the real library, ours with the same losses.

``benchmarks/compat_scripts.py`` has the pair of Ray Train, which starts a cluster of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

SCRIPTS = Path(__file__).parents[2] / "examples" / "coming_from"
PAIRS = {
    "torchrun": "torch",
    "fsdp": "torch",
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "lightning": "lightning",
    "horovod": "paceline",
}
"""By the folder of a pair, the library that theirs needs."""
# One rank adds 16 gradients and two ranks add 8 each: in float32 that is a difference in the seventh
# digit. The 8 steps of these scripts carry it into the sixth, which is the last that they print.
CLOSE = 1e-5


def run_script(path: str, folder: str) -> str:
    """What a rank prints that runs the script as a launcher would start it."""
    os.chdir(folder)
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # from torchrun: some libraries look for it
    horovod = path.endswith("horovod/theirs.py")
    if horovod:
        from paceline.compat.horovod import alias

        alias.install()
    sys.argv = [path]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    finally:
        forget(horovod)
    return printed.getvalue()


def forget(horovod: bool) -> None:
    """Undo what a script leaves to the end of its process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    if horovod:
        from paceline.compat.horovod import alias

        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, alias.HorovodFinder)]
        for module in [m for m in sys.modules if m.partition(".")[0] == "horovod"]:
            del sys.modules[module]
    if dist.is_initialized():
        dist.destroy_process_group()


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^loss (\S+)$", text, flags=re.MULTILINE)]


@pytest.mark.parametrize("name", PAIRS)
def test_ours_has_the_losses_of_theirs(name: str, rank_pool: Any, tmp_path: Path) -> None:
    found = {}
    for script, ranks in (("ours", 1), ("ours", 2), ("theirs", 2)):
        if script == "theirs" and importlib.util.find_spec(PAIRS[name]) is None:
            pytest.skip(f"{PAIRS[name]} is not installed")
        path = str(SCRIPTS / name / f"{script}.py")
        printed = rank_pool.run(run_script, path, str(tmp_path), world_size=ranks, join=False)
        found[script, ranks] = losses(printed[0])
    wanted = found["theirs", 2]
    assert len(wanted) >= 8
    assert wanted[-1] < wanted[len(wanted) // 2 - 1]  # the same samples, an epoch earlier
    for ours in (found["ours", 1], found["ours", 2]):
        assert ours == pytest.approx(wanted, rel=CLOSE, abs=1e-6)
