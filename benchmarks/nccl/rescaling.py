"""A world that shrinks and grows over NCCL: two launchers with a rank each, one of them killed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from nccl.faulty import SLOW
from paceline.events import Event, RanksStarted, StepDone, read

BENCHMARKS = Path(__file__).parents[1]
STEPS = 120
PAUSE = 6  # steps that a world gets before the next change


def rescale(device: str, budget: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """What came of a run whose world went from two to one and back, in float64."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-rescaling-") as place:
        folder = Path(place)
        with _Run(folder / "undisturbed", device, budget) as run:
            run.start("a")
            run.start("b")
            run.hurry()
            run.end()
            expected = run.losses()
        with _Run(folder / "rescaled", device, budget) as run:
            run.start("a")
            run.start("b")
            run.goes_on_with(2)
            run.kill("b")
            run.goes_on_with(1)
            run.start("b")
            run.goes_on_with(2)
            run.hurry()
            run.end()
            found = run.losses()
    worst = max(abs(found[step] - loss) for step, loss in expected.items())
    same = found.keys() == expected.keys() and worst <= 1e-9
    cell = {"outcome": "same" if same else "differs", "difference": worst, "words": ""}
    yield "worlds of 2, 1 and 2 ranks", {**cell, "seconds": time.monotonic() - started}


class _Run:
    """The launchers of one run; none outlives the ``with`` block."""

    def __init__(self, folder: Path, device: str, budget: float) -> None:
        folder.mkdir()
        self.folder, self.slow = folder, folder / "slow"
        self.slow.touch()
        self.deadline = time.monotonic() + budget / 2
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.rdzv = f"127.0.0.1:{server.getsockname()[1]}"
        settings = {
            "model": {"target": "nccl.faulty:Net"},
            "data": {"target": "nccl.faulty:Vectors"},
            "loss": {"target": "torch.nn:CrossEntropyLoss"},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "batch": {"global_batch": 16},
            "train": {"steps": STEPS, "clip_norm": 1.0},
            "precision": "fp64",
            "checkpoint": {"every": 2},
            "launch": {"device": device, "nproc": 1, "node_timeout": 6, "standby": False},
            "track": {"progress": False},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers.values():
            with contextlib.suppress(ProcessLookupError):
                launcher.kill()
            launcher.wait()

    def start(self, name: str) -> None:
        """One more launcher; to NCCL each is a host of its own, as two hosts cannot be one GPU."""
        path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
        nccl = {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        environment = {**os.environ, **nccl, "PYTHONPATH": path, SLOW: str(self.slow)}
        command = [sys.executable, "-m", "paceline", "train", "config.yaml", "--nnodes", "1:2"]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.launchers[name] = subprocess.Popen(
                [*command, "--rdzv", self.rdzv],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def kill(self, name: str) -> None:
        """As if the machine were gone."""
        self.launchers[name].kill()

    def hurry(self) -> None:
        """Steps take no longer than they must."""
        self.slow.unlink()

    def goes_on_with(self, ranks: int) -> None:
        """Wait until a world of that size has done some steps."""

        def done() -> bool:
            size = steps = 0
            for event in self.events():
                if isinstance(event, RanksStarted):
                    size, steps = event.world_size, 0
                elif isinstance(event, StepDone):
                    steps += 1
            return size == ranks and steps >= PAUSE

        self._wait(done, f"a world of {ranks}")

    def end(self) -> None:
        """Wait until all launchers have ended well."""
        self._wait(lambda: all(p.poll() is not None for p in self.launchers.values()), "the end")
        codes = [launcher.returncode for launcher in self.launchers.values()]
        if any(codes):
            raise SystemExit(f"launchers ended with {codes}\n{self._said()}")

    def events(self) -> list[Event]:
        """Of the run so far."""
        found = list(self.folder.glob("runs/*/events.jsonl"))
        return list(read(found[0])) if found else []

    def losses(self) -> dict[int, float]:
        """Of each step; of one that was repeated, the last."""
        return {event.step: event.loss for event in self.events() if isinstance(event, StepDone)}

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        while not there():
            if time.monotonic() > self.deadline:
                raise SystemExit(f"waited too long for {what}\n{self._said()}")
            time.sleep(0.2)

    def _said(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("runs/*/logs/**/*.log")]
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs
        )
