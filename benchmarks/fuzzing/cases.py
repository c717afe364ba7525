"""The kinds of cases: each makes something hostile in a box and says what is to be run on it."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing import readers, template
from fuzzing.messages import message_case
from fuzzing.mutations import Mutator
from fuzzing.sandbox import CANARY, Prepared


@dataclass(frozen=True)
class Maker:
    """Makes cases from sound things; ``make(kind, number)`` is a function for the sandbox."""

    run: Path
    weights: Path
    recipes: Path
    outside: Path
    seed: int

    def make(self, kind: str, number: int) -> Callable[[Path], Prepared]:
        """The case ``number`` of a kind, always the same for a seed."""

        def prepare(box: Path) -> Prepared:
            chance = random.Random(f"{self.seed} {kind} {number}")
            hand = Mutator(chance, self.outside, CANARY)
            command, call = _KINDS[kind](self, hand, box)
            return command, call, hand.done

        return prepare


def _checkpoint(maker: Maker, hand: Mutator, box: Path) -> tuple[list[str], Callable[[], Any]]:
    chance = hand.chance
    if chance.random() < 0.15:
        return _import(maker, hand, box)
    run = box / "run"
    shutil.copytree(maker.run, run)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _spoil_checkpoint(hand, run / "checkpoints")
    where = chance.choice(("run", "run/checkpoints", "run/checkpoints/step-000000004"))
    command = chance.choice(
        (
            ["ls", where], ["ls", where, "--json"], ["show", where, "--tensors"],
            ["show", where, "--json"], ["verify", where], ["verify", "run", "--all", "--json"],
            ["diff", where, "run/checkpoints/step-000000002"],
            ["diff", "run/checkpoints/step-000000002", where, "--json", "--limit", "0"],
            ["export", where, "out.safetensors"], ["export", where, "out.pt", "--format", "torch"],
            ["export", where, "/dev/full", "--force"], ["export", where, "hf", "--format", "hf"],
            ["prune", "run", "--keep-last", "1", "--yes"],
            ["prune", "run", "--keep-best", "1", "--metric", "loss", "--yes", "--json"],
            ["prune", "run", "--keep-last", "1", "--dry-run"],
        )
    )  # fmt: skip
    return _cli(["checkpoint", *command])


def _spoil_checkpoint(hand: Mutator, folder: Path) -> None:
    chance = hand.chance
    step = folder / chance.choice(("step-000000002", "step-000000004"))
    manifest = step / "manifest.json"
    if chance.random() < 0.7 and _is_plain(manifest):
        rest = manifest.read_bytes().partition(b"\n")[2]
        try:
            content = json.loads(rest)
        except (ValueError, RecursionError):
            return
        content = hand.mutate(content, chance.randint(1, 3))
        body = hand.json_text(content)
        if chance.random() < 0.1:
            body = hand.spoil(body)
        head = hand.mutate({"paceline_checkpoint": 2}) if chance.random() < 0.05 else None
        manifest.write_bytes(template.with_hash(body, head if isinstance(head, dict) else None))
        return
    inside = step.iterdir() if step.is_dir() and not step.is_symlink() else ()
    there = [folder, folder / ".lock", step, *inside]
    path = chance.choice(there)
    if _is_plain(path) and chance.random() < 0.5:
        path.write_bytes(hand.spoil(path.read_bytes()))
    else:
        hand.break_file(path)


def _import(maker: Maker, hand: Mutator, box: Path) -> tuple[list[str], Callable[[], Any]]:
    chance = hand.chance
    shutil.copytree(maker.weights, box / "weights")
    name = chance.choice(("model.safetensors", "model.pt", "hf"))
    files = [box / "weights" / name]
    if name == "hf":
        files = [*files[0].iterdir()]
    path = chance.choice(files)
    if chance.random() < 0.6:
        path.write_bytes(hand.spoil(path.read_bytes()))
    elif chance.random() < 0.5 and name == "model.pt":
        path.write_bytes(template.pickled(hand.mutate({"a": [1], "model": {"w": None}}, 3)))
    else:
        hand.break_file(path)
    return _cli(["checkpoint", "import", f"weights/{name}", "imported"])


def _run(maker: Maker, hand: Mutator, box: Path) -> tuple[list[str], Callable[[], Any]]:
    chance = hand.chance
    run = box / "run"
    shutil.copytree(maker.run, run)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if chance.random() < 0.7:
            _spoil_events(hand, run / "events.jsonl")
        else:
            logs = [path for path in run.rglob("*.log") if _is_plain(path)]
            names = [run / name for name in ("events.jsonl", "config.yaml", ".lock", "logs")]
            path = chance.choice([*names, *logs])
            if _is_plain(path) and chance.random() < 0.5:
                path.write_bytes(hand.spoil(path.read_bytes()))
            else:
                hand.break_file(path)
    if chance.random() < 0.4:
        return ["(readers of events)"], lambda: readers.read_all(run)
    return _cli(
        chance.choice(
            (
                ["diagnose", "run"], ["diagnose", "run", "--all"], ["diagnose", "run", "--json"],
                ["diagnose"], ["checkpoint", "ls", "run"], ["config", "check", "run/config.yaml"],
            )
        )
    )  # fmt: skip


def _spoil_events(hand: Mutator, path: Path) -> None:
    chance = hand.chance
    if not _is_plain(path):
        return
    lines = path.read_bytes().splitlines()
    for _ in range(chance.choice((1, 2, 5, 20))):
        if not lines:
            break
        at = chance.randrange(len(lines))
        how = chance.random()
        if how < 0.75:
            try:
                record = json.loads(lines[at])
            except (ValueError, RecursionError):
                continue
            lines[at] = hand.json_text(hand.mutate(record, chance.randint(1, 2)))
        elif how < 0.85:
            lines[at] = hand.spoil(lines[at])
        elif how < 0.95:
            other = chance.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            del lines[at]
    path.write_bytes(b"\n".join(lines) + b"\n" * chance.randint(0, 1))


def _config(maker: Maker, hand: Mutator, box: Path) -> tuple[list[str], Callable[[], Any]]:
    chance = hand.chance
    if chance.random() < 0.2:
        return _cli(_schedule(hand))
    import yaml

    source = chance.choice([maker.run / "config.yaml", *sorted(maker.recipes.glob("*.yaml"))])
    path = box / "config.yaml"
    data = yaml.safe_load(source.read_text())
    if chance.random() < 0.6:
        path.write_bytes(hand.json_text(hand.mutate(data, chance.randint(1, 3))))
    elif chance.random() < 0.8:
        path.write_bytes(hand.spoil(source.read_bytes()))
    else:
        path.write_bytes(b"x")
        hand.break_file(path)
    command = ["config", chance.choice(("check", "show")), "config.yaml"]
    if chance.random() < 0.2:
        axis = chance.choice(("dp", "tp", "pp", "zero", "replicas", "x"))
        command += ["--layout", f"{axis}={_argument(hand)}"]
    if chance.random() < 0.2:
        key = chance.choice(("train.steps", "layout", "model.args.width", "launch.nproc", "x.y"))
        command += ["--set", f"{key}={_argument(hand)}"]
    return _cli(command)


def _schedule(hand: Mutator) -> list[str]:
    chance = hand.chance
    name = chance.choice(("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev", "\x1b[2J"))
    numbers = (0, -1, 1, 2, 3, 8, 64, 300, 100_000, 10**9, 10**30)
    command = ["schedule", name]
    for option in ("--ranks", "--microbatches", "--stages"):
        if chance.random() < 0.6:
            command += [option, str(chance.choice(numbers))]
    for option in ("--forward", "--backward", "--p2p"):
        if chance.random() < 0.2:
            command += [option, str(chance.choice(("0", "nan", "inf", "1e308", "-1", "0.333")))]
    if chance.random() < 0.3:
        command += ["--svg", chance.choice(("x.svg", "/dev/full", "/no/x.svg", ".", ""))]
    hand.done.append("arguments")
    return command


def _is_plain(path: Path) -> bool:
    """Whether it is a small file of the box, and not where a link leads."""
    inside = not any(one.is_symlink() for one in (path, *path.parents))
    return inside and path.is_file() and os.stat(path).st_size < 1 << 20


def _argument(hand: Mutator) -> str:
    """A text as a command line can hold it."""
    text = str(hand.value())[:2000].replace("\0", "0")
    return text.encode("utf-8", "surrogateescape" if "\ud800" not in text else "replace").decode(
        "utf-8", "replace"
    )


def _cli(command: list[str]) -> tuple[list[str], Callable[[], Any]]:
    def call() -> None:
        from paceline.cli import main

        sys.argv = ["paceline", *command]
        main()

    return command, call


_KINDS: dict[str, Callable[[Maker, Mutator, Path], tuple[list[str], Callable[[], Any]]]] = {
    "checkpoint": _checkpoint,
    "run": _run,
    "config": _config,
    "message": lambda maker, hand, box: message_case(hand, box),
}
KINDS = tuple(_KINDS)
