"""A sound run folder, small, made once: what cases copy and spoil."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
import xxhash

from paceline import events
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import RankState, whole_part
from paceline.checkpoint.sharded.save_load import save
from paceline.config import dump, load, resolve

STEPS = (2, 4)
_LOG = 'hello\nTraceback (most recent call last):\n  File "x.py", line 3\nE: no\n'


def make_run(folder: Path) -> Path:
    """A run that was restarted once and finished, with two checkpoints and a log of each rank."""
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump(resolve(load(None, ["launch.nproc=2"]))))
    log = events.EventLog(run)
    for event in _events(run):
        log.write(event)
    log.close()
    for attempt in ("", "attempt1"):
        logs = run / "logs" / attempt
        logs.mkdir(parents=True, exist_ok=True)
        for rank in (0, 1):
            text = f'hello\nTraceback (most recent call last):\n  File "x.py", line {rank}\nE: no\n'
            (logs / f"rank{rank}.log").write_text(text)
    checkpoints = Folder(run / "checkpoints")
    checkpoints.storage.make_folder()
    for step in STEPS:
        save(checkpoints, step, _state(step), info=_info(step), group=None)
    return run


def _state(step: int) -> RankState:
    tensors = {
        "model/weight": torch.arange(24.0).reshape(4, 6) * step,
        "model/bias": torch.ones(6),
        "optimizer/step": torch.tensor(step),
        "optimizer/scale": torch.ones(3, dtype=torch.bfloat16),
    }
    loop = {"epoch": 1, "best": [0.5, "x"], "history": {"loss": [1.0, 2.0]}}
    parts = {name: whole_part(tensor) for name, tensor in tensors.items()}
    return RankState(parts, {"loop": loop, "loader": {"position": step}})


def _info(step: int) -> dict[str, Any]:
    return {
        "layout": "dp=2", "world_size": 2, "reason": "every", "time": "2025-01-31T14:25:01+00:00",
        "metrics": {"loss": 1.0 / step}, "versions": {"torch": "2", "paceline": "0"},
    }  # fmt: skip


def _events(run: Path) -> list[events.Event]:
    started = dict(
        layout="dp=2", world_size=2, device="cpu", precision="fp32", global_batch=8, parameters=30,
        samples_per_epoch=64, total_steps=8,
    )  # fmt: skip
    by_rank = {name: [1, 2] for name in ("parameters", "gradients", "optimizer", "buffers")}
    by_rank |= {name: [3, 4] for name in ("activations", "peak", "current")}
    log = str(run / "logs" / "rank1.log")
    steps = [
        events.StepDone(
            step=n, epoch=0, loss=1.0 / n, lr=0.1, samples=8, seconds=0.1, grad_norm=1.0
        )
        for n in range(1, 9)
    ]
    return [
        events.RanksStarted(nproc=2, world_size=2, nodes=["alpha", "beta"]),
        events.RunStarted(**started), *steps[:4],
        events.MemoryMeasured(step=1, **by_rank),
        events.StepSplit(step=4, steps=4, phases={"data": [0.1, 0.2], "forward": [0.1, 0.1]}),
        events.WireUsed(step=4, steps=4, bytes_sent=[10, 10], bytes_plain=[20, 20]),
        events.Straggler(step=4, rank=1, host="beta", phase="data", factor=2.0, costs=0.1,
                         share=0.2),
        events.EvalDone(step=4, epoch=0, metrics={"loss": 0.5}, samples=8, seconds=0.1),
        events.Baseline(name="bigram", loss=2.0),
        events.CheckpointSaved(step=4, path=str(run), bytes=9, seconds=0.1, reason="every"),
        events.CheckpointFailed(step=4, reason="every", error="disk full"),
        events.NonFinite(step=4, what="loss", ranks=[1], action="skip"),
        events.HangFound(step=4, seconds=9.0, what="missing", ranks=[1], summary="rank 1",
                         detail="a\nb", action="restart"),
        events.HangOver(step=4, seconds=1.0),
        events.RankLost(rank=1, host="beta", cause="failed", error="E: no", exit_code=1, step=4,
                        log=log),
        events.NodeLeft(host="beta", reason="lost"), events.NodeJoined(host="beta"),
        events.Restarting(reason="failure", detail="rank 1", used=1, budget=3),
        events.RanksStarted(nproc=2, world_size=2, attempt=1),
        events.RestoreTried(rung="disk", step=4, ok=True, detail="", seconds=0.1),
        events.RunStarted(**started, first_step=4), *steps[4:],
        events.Note(message="mind the gap", level="warning"),
        events.EpochDone(step=8, epoch=0, loss=0.1, samples=64, seconds=1.0),
        events.GaveUp(reason="enough"), events.RunFailed(rank=1, error="E", exit_code=1),
        events.RunFinished(reason="done", step=8, epoch=1, samples=64, seconds=2.0),
    ]  # fmt: skip


def make_weights(folder: Path) -> Path:
    """Files for ``checkpoint import``: safetensors, torch and a Hugging Face folder."""
    from safetensors.torch import save_file

    weights = folder / "weights"
    (weights / "hf").mkdir(parents=True)
    state = {"a.weight": torch.ones(4, 3), "a.bias": torch.zeros(4)}
    save_file(state, weights / "model.safetensors")
    save_file(state, weights / "hf" / "model.safetensors")
    (weights / "hf" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    torch.save(state, weights / "model.pt")
    return weights


def with_hash(body: bytes, head: dict[str, Any] | None = None) -> bytes:
    """A manifest with this body, whose hash is right."""
    first = {
        "paceline_checkpoint": 2,
        "bytes": len(body),
        "xxh3_128": xxhash.xxh3_128_hexdigest(body),
    }
    return json.dumps({**first, **(head or {})}).encode() + b"\n" + body + b"\n"


def pickled(value: Any) -> bytes:
    """As torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
