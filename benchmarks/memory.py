"""Bytes that each rank holds on each layout, beside what the layout should hold in theory.

Each layout trains the same GPT on local ranks and measures a step (``engine.memory()``). Theory:
between steps a rank holds 1/N of parameters, gradients and optimizer state, N being the ranks that
``zero``, ``tp`` and ``pp`` cut them over; ``tp`` keeps norms and biases whole, and ``pp`` cuts at
whole blocks, which makes them a little more. On top comes what a step holds for a while, beside one
process's activations: with ``zero=1`` the gathered parameters and the whole gradients; with
``zero=2`` the gathered parameters, the gradient's piece and the gradients of one block; with
``zero=3`` the gradient's piece, the root and three blocks (one computing, one being fetched, one
whose gradients are being summed).

    python benchmarks/memory.py [--ranks 4] [--layers 16] [--width 128]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import paceline
from paceline.layout import Layout
from paceline.models import GPT, token_cross_entropy
from paceline.testing import RankPool

RESULTS = Path(__file__).parent / "results" / "memory.json"
KINDS = ("parameters", "gradients", "optimizer")
CONTEXT, VOCAB = 16, 512


def measure(layout: str, layers: int, width: int) -> list[dict[str, Any]]:
    """On each rank: train two steps, measure the second."""
    torch.manual_seed(0)
    model = GPT(VOCAB, CONTEXT, layers, heads=4, width=width, tied=False)
    block_bytes = sum(p.nbytes for p in model.blocks[0].parameters())
    engine = paceline.Engine(
        model,
        optimizer=torch.optim.AdamW(model.parameters()),
        loss=token_cross_entropy,
        layout=layout,
        microbatch=1,
    )
    draw = torch.Generator().manual_seed(engine.coordinate.dp)
    tokens = torch.randint(0, VOCAB, (2, CONTEXT + 1), generator=draw)
    batch = (tokens[:, :-1], tokens[:, 1:])
    engine.step(batch)
    with engine.measuring_memory():
        engine.step(batch)
    found = [memory.to_dict() for memory in engine.memory()]
    for one in found:
        one["layers"] = layers
        one["root"] = engine.parameter_count * 4 - layers * block_bytes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    n = options.ranks
    layouts = [
        *("dp=1", f"dp={n}", f"dp={n},zero=1", f"dp={n},zero=2", f"dp={n},zero=3"),
        *(f"dp={n},zero=3,replicas=2", f"tp={n}", f"pp={n}", f"dp={n // 2},zero=3,tp=2"),
    ]
    table = Table(title=f"GPT, {options.layers} blocks of width {options.width}: KiB on a rank")
    columns = ("layout", "rank", *(f"{k} (theory)" for k in KINDS), "worst", "step adds (stated)")
    for column in columns:
        table.add_column(column, justify="left" if column == "layout" else "right")
    rows: list[dict[str, Any]] = []
    with RankPool() as pool:
        size = Layout.parse(layouts[0]).world_size
        base = pool.run(measure, "dp=1", options.layers, options.width, world_size=size)[0][0]
        for text in layouts:
            layout = Layout.parse(text)
            found = pool.run(
                measure, text, options.layers, options.width, world_size=layout.world_size
            )[0]
            for rank in sorted({0, layout.world_size - 1}):
                row = one_row(text, layout, found, rank, base)
                rows.append(row)
                table.add_row(*cells(row))
    Console(width=150).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"options": vars(options), "rows": rows}, indent=2))
    print(f"written to {RESULTS}")


def one_row(
    text: str, layout: Layout, found: list[dict[str, Any]], rank: int, base: dict[str, Any]
) -> dict[str, Any]:
    own = found[rank]
    expected = {kind: base[kind] / (layout.shards * layout.tp * layout.pp) for kind in KINDS}
    standing = sum(own[kind] for kind in ("parameters", "optimizer"))
    return {
        "layout": text,
        "rank": rank,
        **{kind: own[kind] for kind in KINDS},
        "theory": expected,
        "worst": max(own[kind] / expected[kind] for kind in KINDS),
        "step_adds": own["peak"] - standing,
        "stated": stated(layout, own["gradients"], base) if layout.tp * layout.pp == 1 else None,
    }


def stated(layout: Layout, piece: int, base: dict[str, Any]) -> float:
    """What a step should hold besides parameters and optimizer state, by the text above."""
    whole, root, layers = base["parameters"], base["root"], base["layers"]
    activations = base["peak"] - base["parameters"] - base["optimizer"] - base["gradients"]
    block = (whole - root) / layers
    by_stage: dict[int, float] = {
        0: whole if layout.dp == 1 else 2 * whole,  # DDP keeps buckets beside the gradients
        1: 2 * whole,
        2: whole + piece + block,
        3: piece + root + 3 * block,
    }
    return by_stage[layout.zero] + activations


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["layout"],
        str(row["rank"]),
        *(f"{row[kind] / 1024:.0f} ({row['theory'][kind] / 1024:.0f})" for kind in KINDS),
        f"{row['worst']:.3f}",
        f"{row['step_adds'] / 1024:.0f}"
        + (f" ({row['stated'] / 1024:.0f})" if row["stated"] is not None else ""),
    ]


if __name__ == "__main__":
    main()
