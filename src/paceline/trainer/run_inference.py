"""What each rank of ``paceline evaluate`` and ``paceline predict`` runs.

``python -m paceline.trainer.run_inference CONFIG RUN_DIR REQUEST``: rank 0 leaves the outcome
beside the request.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.locate import Which
from paceline.config import Config, load
from paceline.events import EvalDone, PhaseProgress, read
from paceline.options.ema import Weights
from paceline.trainer.run import layout_for, make_dataset, make_model, make_trainer
from paceline.trainer.trainer import Trainer
from paceline.world import World

_OUTCOME = "outcome.json"

# What only training needs; some of it would cost memory or threads.
_NOT_TRAINING: dict[str, Any] = {
    "schedule": None,
    "compress": None,
    "local_steps": None,
    "ema": None,
    "checkpoint_activations": None,
    "clip_norm": None,
    "clip_value": None,
}


@dataclass(frozen=True)
class InferenceRequest:
    """What a command asks of the ranks; it travels to them as a file."""

    verb: str
    """``evaluate`` or ``predict``."""
    which: Which = "last"
    ema: bool = False
    """Whether the averaged weights are asked for."""
    data: str = "val"
    """``train`` or ``val``."""
    batches: int | None = None
    out: str | None = None
    overwrite: bool = False
    take: str | None = None

    def write(self, folder: Path) -> Path:
        """Leave it in ``folder`` for the ranks."""
        file = folder / "request.json"
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return file


def read_outcome(folder: Path) -> dict[str, Any]:
    """What rank 0 left in ``folder``: the checkpoint's step, samples, seconds and metrics."""
    outcome: dict[str, Any] = json.loads((folder / _OUTCOME).read_text(encoding="utf-8"))
    return outcome


def infer(config: Config, run_dir: Path, request: InferenceRequest, folder: Path) -> None:
    """Do what ``request`` says with the model of a run, on this rank of the world."""
    world = World.init(
        device=config.launch.device,
        share_gpu=config.launch.share_gpu,
        timeout=config.launch.timeout,
        hang_after=config.hangs.after or 0.0,
    )
    torch.manual_seed(config.seed)
    options = config.engine_options(layout=layout_for(config, world.size), **_NOT_TRAINING)
    trainer = make_trainer(config, make_model(config), run_dir, **options.arguments())
    trainer.pass_events_dir = folder
    data = make_dataset(config, request.data)
    metrics = _run(trainer, data, request)
    if world.is_main:
        _leave_outcome(folder, metrics)


def _run(trainer: Trainer, data: Any, request: InferenceRequest) -> dict[str, float]:
    weights: Weights = "ema" if request.ema else "model"
    if request.verb == "evaluate":
        return trainer.evaluate(data, which=request.which, weights=weights, batches=request.batches)
    assert request.out is not None
    trainer.predict(
        data,
        out=request.out,
        overwrite=request.overwrite,
        which=request.which,
        weights=weights,
        take=request.take,
    )
    return {}


def _leave_outcome(folder: Path, metrics: dict[str, float]) -> None:
    """What the events say of the pass, for the command to print."""
    told = [event for event in read(folder) if isinstance(event, EvalDone | PhaseProgress)]
    outcome = {
        "step": told[-1].step,
        "samples": told[-1].samples,
        "seconds": told[-1].time - told[0].time,
        "metrics": metrics,
    }
    (folder / _OUTCOME).write_text(json.dumps(outcome), encoding="utf-8")


def main() -> None:
    """Evaluate or predict as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("request", type=Path)
    parser.add_argument("--code", nargs="*", metavar="FOLDER", default=[])
    asked = parser.parse_args()
    config = load(asked.config).model_copy(update={"code": asked.code})
    request = InferenceRequest(**json.loads(asked.request.read_text(encoding="utf-8")))
    infer(config, asked.run_dir, request, asked.request.parent)


if __name__ == "__main__":
    main()
