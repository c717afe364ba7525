"""The parity matrix: every layout beside one process, on seven models; written into the docs.

Each cell is a proof by ``paceline.verify``: three steps in float64 with accumulation, clipping and
AdamW on up to eight local CPU ranks. It shows the largest relative difference of any loss,
gradient, norm, parameter or buffer, or why the layout is refused.

    python benchmarks/parity_matrix.py --write docs/parity.md     the whole, an hour on two cores
    python benchmarks/parity_matrix.py --rows 'tp=2*' --columns GPT,Llama
    python benchmarks/parity_matrix.py --random 100               random sound pairs

Finished cells are kept in benchmarks/results/parity_matrix.json, so that a run that was stopped
goes on from there; ``--fresh`` starts anew.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parity.columns import COLUMNS, subject
from parity.page import write_cpu_part
from parity.pairs import random_pair
from parity.rows import GLOBAL_BATCH, Row, all_rows, alone, compositions

import paceline
from paceline.prove.prover import PRELOAD
from paceline.testing import RankPool

RESULTS = Path(__file__).parent / "results" / "parity_matrix.json"
BOUND = 1e-9
CHUNK = 6  # layouts to one reference run; a run that is stopped loses at most these
LOADED = [
    *PRELOAD,
    "paceline.models.gpt",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gpt2", "llama", "qwen2", "qwen3", "bert")
    ),
]

Cells = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="*", help="pattern on layouts, like 'tp=2*'")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="models, by name")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="also N random pairs")
    parser.add_argument("--first", type=int, default=0, help="the first random pair's number")
    parser.add_argument("--write", type=Path, help="write the table into this file")
    parser.add_argument("--fresh", action="store_true", help="forget the cells that are there")
    parser.add_argument("--no-matrix", action="store_true", help="random pairs alone")
    arguments = parser.parse_args()
    columns = arguments.columns.split(",")
    if unknown := set(columns) - set(COLUMNS):
        parser.error(f"--columns {', '.join(sorted(unknown))}: not among {', '.join(COLUMNS)}")
    cells: Cells = {}
    if RESULTS.exists() and not arguments.fresh:
        cells = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [row for row in all_rows() if fnmatch.fnmatch(str(row), arguments.rows)]
    with RankPool(timeout=300, preload=LOADED) as pool:
        if not arguments.no_matrix:
            run_matrix(rows, columns, cells, pool)
        if arguments.random:
            run_pairs(arguments.first, arguments.random, cells, pool)
    if arguments.write:
        write_cpu_part(arguments.write, document(cells))
        print(f"wrote {arguments.write}")
    sys.exit(1 if any(is_wrong(cell) for cell in cells.values()) else 0)


def run_matrix(rows: list[Row], columns: list[str], cells: Cells, pool: RankPool) -> None:
    missing = [(row, name) for name in columns for row in rows if key(row, name) not in cells]
    done = 0
    for name, blocks, chunk in _chunks(missing):
        started = time.monotonic()
        report = paceline.verify(
            **subject(name, blocks),
            layouts=[row.case for row in chunk],
            global_batch=GLOBAL_BATCH,
            clip_norm=0.1,
            pool=pool,
            progress=False,
        )
        done += len(chunk)
        print(f"[{done}/{len(missing)}] {name}, {time.monotonic() - started:.0f} s")
        for row, found in zip(chunk, report.rows, strict=True):
            cells[key(row, name)] = _cell(found)
            _show(f"{row} on {name}", cells[key(row, name)])
        _keep(cells)


def _chunks(missing: list[tuple[Row, str]]) -> Iterator[tuple[str, int, list[Row]]]:
    """Rows that share a model: as deep as the stages ask for."""
    for name in dict.fromkeys(name for _, name in missing):
        own = [row for row, other in missing if other == name]
        for blocks in sorted({row.blocks for row in own}):
            rows = [row for row in own if row.blocks == blocks]
            for start in range(0, len(rows), CHUNK):
                yield name, blocks, rows[start : start + CHUNK]


def run_pairs(first: int, count: int, cells: Cells, pool: RankPool) -> None:
    """Prove pairs until ``count`` were sound; those that are refused do not count."""
    number, sound = first, 0
    while sound < count:
        pair = random_pair(number)
        name = f"random {number}"
        if name not in cells:
            report = paceline.verify(
                **pair.arguments, layouts=[pair.layout], pool=pool, progress=False
            )
            cells[name] = _cell(report.rows[0]) | {"pair": str(pair)}
            _keep(cells)
        _show(f"{name}: {pair}", cells[name])
        sound += cells[name]["verdict"] != "refused"
        number += 1


def key(row: Row, column: str) -> str:
    return f"{row} | {column}"


def _cell(row: Any) -> dict[str, Any]:
    return {
        "verdict": row.outcome,
        "difference": row.difference,
        "rule": row.cause if row.outcome == "refused" else None,
        "words": row.words,
        "seconds": round(row.seconds, 1),
    }


def is_wrong(cell: dict[str, Any]) -> bool:
    if cell["verdict"] == "refused":
        return False
    return cell["verdict"] != "same" or cell["difference"] > BOUND


def _show(what: str, cell: dict[str, Any]) -> None:
    if cell["verdict"] == "refused":
        told = f"refused: {cell['words'].splitlines()[0]}"
    else:
        told = f"{cell['difference']:.0e}" if cell["verdict"] == "same" else cell["verdict"].upper()
    print(f"  {what}: {told} ({cell['seconds']} s)", flush=True)
    if is_wrong(cell):
        print(f"    {cell['words']}", flush=True)


def _keep(cells: Cells) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(cells, indent=1), encoding="utf-8")


def document(cells: Cells) -> str:
    """The page of the docs: the tables, and the reasons below them."""
    reasons: list[str] = []
    columns = [name for name in COLUMNS if any(k.endswith(f" | {name}") for k in cells)]
    proven = [c for k, c in cells.items() if " | " in k and c["verdict"] == "same"]
    refused = sum(c["verdict"] == "refused" for k, c in cells.items() if " | " in k)
    lines = [
        "# Parity",
        "",
        "`python benchmarks/parity_matrix.py --write docs/parity.md` wrote these tables. Each cell "
        "is a proof by [`paceline verify`](guides/verify.md): a layout on local CPU ranks beside "
        f"one process, three AdamW steps of {GLOBAL_BATCH} samples in float64 with accumulation "
        "and clipping. The number is the largest relative difference of any loss, gradient, norm, "
        f"parameter or buffer; the bound is {BOUND:.0e}. GPT and MLP are Paceline's own, the "
        "convnet has synchronised batch norms; the others are unmodified Hugging Face models with "
        "random weights. The models have two blocks, or as many as the pipeline has stages.",
        "",
        f"{len(proven)} cells proven, the largest difference "
        f"{max((c['difference'] for c in proven), default=0.0):.0e}; {refused} refused.",
        "",
        "## Each by itself",
        "",
        *_table(alone(), columns, cells, reasons),
        "",
        "## Composed",
        "",
        "Every two values of two axes that can go together meet in a row.",
        "",
        *_table(compositions(), columns, cells, reasons),
    ]
    if reasons:
        lines += ["", "## Why refused", ""]
        lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    lines += ["", *_random_pairs(cells)]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[Row], columns: list[str], cells: Cells, reasons: list[str]) -> list[str]:
    lines = [f"| layout | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        told = [_told(cells.get(key(row, name)), reasons) for name in columns]
        lines.append(f"| `{row}` | {' | '.join(told)} |")
    return lines


def _told(cell: dict[str, Any] | None, reasons: list[str]) -> str:
    if cell is None:
        return ""
    if cell["verdict"] != "refused":
        right = cell["verdict"] == "same" and not is_wrong(cell)
        return f"{cell['difference']:.0e}" if right else f"**{cell['verdict']}**"
    # One that names each module is told by its first; the row names the layout already.
    reason = " ".join(line.strip() for line in cell["words"].splitlines()[:2])
    reason = reason.partition(": ")[2] if reason.startswith("layout ") else reason
    reason += f" (rule `{cell['rule']}`)" if cell["rule"] else ""
    if reason not in reasons:
        reasons.append(reason)
    return f"refused [{reasons.index(reason) + 1}](#why-refused)"


def _random_pairs(cells: Cells) -> list[str]:
    pairs = [cell for name, cell in cells.items() if name.startswith("random ")]
    sound = [cell for cell in pairs if cell["verdict"] != "refused"]
    if not sound:
        return []
    wrong = [cell["pair"] for cell in sound if is_wrong(cell)]
    alarms = "no false alarm" if not wrong else f"FALSE ALARMS on {'; '.join(wrong)}"
    largest = max(cell["difference"] for cell in sound)
    return [
        "## Random pairs",
        "",
        f"`python benchmarks/parity_matrix.py --no-matrix --random {len(sound)}`: {len(sound)} "
        "random sound pairs of a layout (dp, zero, replicas, tp, sequence, pp, schedule, "
        "microbatch) and a model (perceptrons of random shapes, convnets, tied and untied GPTs, "
        f"Hugging Face configs), random batch, optimizer and clipping: {alarms}, the largest "
        f"difference {largest:.0e}. {len(pairs) - len(sound)} more were refused and not counted.",
    ]


if __name__ == "__main__":
    main()
