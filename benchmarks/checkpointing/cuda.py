"""How long a training step on a GPU stands still for a save, in a real training loop."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import paceline
from checkpointing import report
from checkpointing.rivals import quiet
from paceline.checkpoint.checkpoints import Checkpoints
from paceline.models import GPT, token_cross_entropy

CONTEXT, VOCAB = 1024, 50304


def stall_of_a_step(options: argparse.Namespace) -> None:
    """Train on one GPU; save between steps by Paceline, torch.save and dcp.async_save in turn."""
    engine, batch = _engine(options)

    def step() -> None:
        engine.step(batch)
        torch.cuda.synchronize()

    for _ in range(5):
        step()
    quiet_step = report.median([_timed(step) for _ in range(20)])
    stalls: dict[str, list[float]] = {"Paceline": [], "torch.save": [], "dcp.async_save": []}
    during: dict[str, list[float]] = {"Paceline": [], "dcp.async_save": []}
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        folder = Path(root)
        checkpoints = Checkpoints(folder / "own", engine, options=paceline.Checkpointing(keep=1))
        for turn in range(options.repeats + 1):
            step()
            stalls["Paceline"].append(_timed(checkpoints.save))
            while checkpoints.busy:
                during["Paceline"].append(_timed(step))
            for outcome, _, _ in checkpoints.finished(wait=True):
                assert outcome.error is None, outcome.error
            stalls["torch.save"].append(_timed(lambda: _torch_save(engine, folder / "whole.pt")))
            (folder / "whole.pt").unlink()
            stalled, future = _dcp_save(engine, folder / "dcp")
            stalls["dcp.async_save"].append(stalled)
            while not future.done():
                during["dcp.async_save"].append(_timed(step))
            future.result()
            shutil.rmtree(folder / "dcp")
            last = ", ".join(f"{name} {values[-1]:.3f} s" for name, values in stalls.items())
            report.console.print(f"turn {turn} of {options.repeats}: {last}")
        size = checkpoints.folder.checkpoints()[-1].manifest.size
        checkpoints.close()
    stalls = {name: values[1:] for name, values in stalls.items()}  # the first pinned the memory
    _tell(options, engine, quiet_step, stalls, during, size)


def _engine(options: argparse.Namespace) -> tuple[paceline.Engine, Any]:
    torch.manual_seed(0)
    heads = max(options.width // 128, 1)
    with torch.device("cuda"):
        model = GPT(VOCAB, CONTEXT, options.layers, heads=heads, width=options.width)
    engine = paceline.Engine(
        model,
        loss=token_cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        precision="bf16",
        clip_norm=1.0,
    )
    tokens = torch.randint(0, VOCAB, (options.batch, CONTEXT + 1), device="cuda")
    return engine, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _timed(action: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _torch_save(engine: paceline.Engine, path: Path) -> None:
    torch.save([engine.model.state_dict(), engine.optimizer.state_dict()], path)


def _dcp_save(engine: paceline.Engine, folder: Path) -> tuple[float, Any]:
    """The stall until the state is staged, and a future of the rest."""
    parameters = dict(engine.model.named_parameters())
    state: dict[str, Any] = {name: value.detach() for name, value in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in engine.optimizer.state[parameter].items():
            state[f"{name}/{key}"] = value
    began = time.perf_counter()
    with quiet():
        writer = dcp.FileSystemWriter(folder)
        answer: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
    if hasattr(answer, "staging_completion"):
        answer.staging_completion.result()
        answer = answer.upload_completion
    return time.perf_counter() - began, answer


def _tell(
    options: argparse.Namespace,
    engine: paceline.Engine,
    quiet_step: float,
    stalls: dict[str, list[float]],
    during: dict[str, list[float]],
    size: int,
) -> None:
    rows = []
    for name, values in stalls.items():
        slowed = f"{report.median(during[name]) / quiet_step:.2f}" if during.get(name) else ""
        middle = report.median(values)
        ratio = report.median_ratio(values, stalls["torch.save"])
        rows.append([name, f"{1000 * middle:.0f}", f"{size / middle / 1e9:.1f}"])
        rows[-1] += [f"{middle / quiet_step:.2f}", f"{ratio:.3f}", slowed]
    report.show(
        f"GPT of {engine.parameter_count / 1e9:.2f} B parameters, {size / 1e9:.1f} GB with Adam, "
        f"on {torch.cuda.get_device_name()}; a step takes {1000 * quiet_step:.0f} ms",
        ["", "stall ms (median)", "GB/s", "in steps", "ratio to torch.save", "steps meanwhile"],
        rows,
    )
    content = {"options": vars(options) | {"json": None}, "step_s": quiet_step, "bytes": size}
    content |= {"stalls_s": stalls, "steps_meanwhile_s": during}
    report.write("checkpoint_speed-cuda", content, options.json)
