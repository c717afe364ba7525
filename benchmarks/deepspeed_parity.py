"""Losses of the same script with DeepSpeed and with paceline.compat.deepspeed, side by side.

    python benchmarks/deepspeed_parity.py --deepspeed-python /path/to/venv/bin/python

The other Python needs DeepSpeed (0.19 was used) and torch; it runs on the CPU. Without it, only our
side is printed. Every case trains an MLP for 12 micro-batches on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 12
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.1}}
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_max_lr": 0.02},
}
FP16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 2}


def stage(number: int) -> dict[str, Any]:
    """ZeRO's stage."""
    return {"zero_optimization": {"stage": number}}


CASES: dict[str, dict[str, Any]] = {
    **{f"stage {n}": {**BASE, **stage(n)} for n in range(4)},
    "stage 2, accumulation 3": {**BASE, **stage(2), "gradient_accumulation_steps": 3},
    "stage 3, accumulation 3": {**BASE, **stage(3), "gradient_accumulation_steps": 3},
    "stage 1, clipping 0.1": {**BASE, **stage(1), "gradient_clipping": 0.1},
    "stage 0, no clipping": {**BASE, **stage(0), "gradient_clipping": 0.0},
    "stage 2, WarmupDecayLR": {**BASE, **stage(2), "scheduler": WARMUP},
    "stage 2, bf16": {**BASE, **stage(2), "bf16": {"enabled": True}},
    "stage 2, fp16, overflows": {**BASE, **stage(2), "fp16": FP16},
    "stage 0, fp16, overflows": {**BASE, **stage(0), "fp16": FP16},
}


def train(library: str, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """On this rank: the losses, loss scales and norms of every case."""
    import torch
    from torch import nn

    if library == "deepspeed":
        import deepspeed
    else:
        import paceline.compat.deepspeed as deepspeed
    results = {}
    deepspeed.init_distributed("gloo")
    rank = int(os.environ.get("RANK", "0"))
    for name in names:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
                              nn.Linear(16, 4))  # fmt: skip
        config = json.loads(json.dumps(CASES[name]))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        generator = torch.Generator().manual_seed(7 + rank)
        low = "bf16" in config or "fp16" in config
        dtype = torch.bfloat16 if "bf16" in config else torch.float16 if low else torch.float32
        losses, scales, norms = [], [], []
        for step in range(STEPS):
            x = torch.randn(4, 8, generator=generator)
            y = torch.randn(4, 4, generator=generator)
            output = engine(x.to(dtype))
            loss = nn.functional.mse_loss(output.float(), y)
            if "overflows" in name and step in (1, 2, 7):
                loss = loss * float("inf")
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
            norm = engine.get_global_grad_norm()
            norms.append(float(norm) if norm is not None else -1.0)
            scales.append(loss_scale(library, engine) if low else 1.0)
        mean = torch.tensor([0.0 if abs(v) == float("inf") else v for v in losses])
        torch.distributed.all_reduce(mean)
        results[name] = {"losses": (mean / 2).tolist(), "scales": scales, "norms": norms}
    return results


def loss_scale(library: str, engine: Any) -> float:
    """What the losses of the next step are multiplied by."""
    if library != "deepspeed":
        return float(engine.loss_scale())
    optimizer = engine.optimizer  # each of its kinds keeps the scale elsewhere
    return float(getattr(optimizer, "loss_scale_config", optimizer).cur_scale)


def run(python: str, library: str) -> dict[str, Any]:
    """All cases on two ranks of ``python``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        if library == "deepspeed":  # its Python is another one
            environment.pop("PYTHONPATH", None)
        command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                   "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__,
                   "--rank-of", library, "--out", str(out)]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-3000:] + done.stderr[-5000:])
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed-python")
    parser.add_argument("--json", help="write the numbers there")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        results = train(asked.rank_of, list(CASES))
        if os.environ["RANK"] == "0":
            Path(asked.out).write_text(json.dumps(results))
        return
    ours = run(sys.executable, "paceline")
    theirs = run(asked.deepspeed_python, "deepspeed") if asked.deepspeed_python else {}
    print("| case | last loss here | DeepSpeed | largest difference | loss scales |")
    print("|---|---|---|---|---|")
    for name, own in ours.items():
        other = theirs.get(name)
        last = f"{own['losses'][-1]:.6f}"
        scales = "" if set(own["scales"]) == {1.0} else " ".join(f"{s:g}" for s in own["scales"])
        if other is None:
            print(f"| {name} | {last} | | | {scales} |")
            continue
        pairs = zip(own["losses"], other["losses"], strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        same = "" if not scales else ("equal: " if own["scales"] == other["scales"] else "DIFFER: ")
        print(f"| {name} | {last} | {other['losses'][-1]:.6f} | {apart:.1e} | {same}{scales} |")
    if asked.json:
        Path(asked.json).write_text(json.dumps({"paceline": ours, "deepspeed": theirs}, indent=1))


if __name__ == "__main__":
    main()
