"""``python -m horovod.runner.launch -np 2 python train.py``: as ``horovodrun`` starts it."""

from __future__ import annotations

from paceline.compat.horovod.runner import run_commandline

__all__ = ["run_commandline"]

if __name__ == "__main__":
    run_commandline()
