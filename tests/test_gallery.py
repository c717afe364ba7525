"""The gallery: what each page says to type works in an empty folder, here on tiny data.

The commands come from the pages. Scripts are started with ``--tiny`` besides, configs with
settings that end soon.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs_blocks import ROOT, blocks

PAGES = ROOT / "docs" / "gallery"
EXAMPLES = ROOT / "examples" / "gallery"
NAMES = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")
OF_THE_TRAINER = re.compile(
    r"samples/s| done, | saved |validation loss|^training .* ranks?|^starting"
    r"|^randomness:|^warning:|^\[transformers\]"
)
TINY_CONFIG = {
    "train.steps": 2,
    "train.eval_batches": 1,
    "model.args.layers": 1,
    "batch.global_batch": 8,
    "schedule.warmup_steps": 0,
}


def tiny(words: list[str]) -> list[str]:
    """A command as printed, ended early."""
    if words[:2] == ["python", "prepare.py"]:
        return [sys.executable, *words[1:], "--most", "3"]
    if words[0] == "python":
        takes = "--tiny" in Path(words[1]).read_text(encoding="utf-8")
        return [sys.executable, *words[1:], *(["--tiny"] if takes else [])]
    assert words[0] == "paceline", words
    words = [sys.executable, "-m", *words]
    if "--script" in words:
        return [*words, *([] if "--" in words else ["--"]), "--tiny"]
    if "--resume" in words:
        return [re.sub(r"train\.steps=\d+", "train.steps=3", word) for word in words]
    if words[3] == "train":
        return [*words, *(f"--set={name}={value}" for name, value in TINY_CONFIG.items())]
    return words


def type_in(name: str, folder: Path) -> dict[str, str]:
    """Type the commands of a page into a folder that has its example; what each printed."""
    page = PAGES / f"{name}.md"
    sources = re.findall(r"\(\.\./\.\./examples/gallery/([\w./]+)\)", page.read_text("utf-8"))
    assert sources, "a page links to its example"
    for source in set(sources):
        shutil.copy(EXAMPLES / source, folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    printed = {}
    for block in blocks(page):
        if block.language == "bash" and not block.not_run:
            for line in block.commands():
                done = subprocess.run(
                    tiny(shlex.split(line)),
                    capture_output=True,
                    text=True,
                    timeout=400,
                    env=environment,
                )
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                printed[line] = done.stdout + done.stderr
    return printed


def results(printed: str) -> list[str]:
    """What the script itself prints: without the trainer's lines, and without times."""
    lines = printed.partition("\n  run folder ")[0].splitlines()
    own = [line for line in lines if line and not OF_THE_TRAINER.search(line)]
    return [re.sub(r" \([\d.]+ m?s\)", "", line) for line in own]


@pytest.mark.parametrize("name", NAMES)
def test_its_commands_work_as_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = type_in(name, tmp_path)
    first = next(iter(printed.values()))
    assert results(first)
    for line, output in printed.items():
        if "--resume" in line:
            assert "resuming " in output, f"{line}\n{output}"
        if "--script" in line:  # on two ranks, it prints what it does on one
            assert results(output) == results(first), line


def test_the_gallery_is_complete() -> None:
    """Every example has a page that shows it, and the index has every page."""
    shown = "".join(page.read_text("utf-8") for page in PAGES.glob("*.md"))
    files = [p.relative_to(EXAMPLES) for p in EXAMPLES.rglob("*") if p.suffix in (".py", ".yaml")]
    assert [str(file) for file in files if f"examples/gallery/{file})" not in shown] == []
    index = (PAGES / "index.md").read_text("utf-8")
    assert [name for name in NAMES if f"({name}.md)" not in index] == []
