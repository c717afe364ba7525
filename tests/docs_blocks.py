"""The code blocks of the pages: found, and told apart by language and by the comment above them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]

FENCE = re.compile(r'^```(\S*)(?: title="([^"]+)")?\s*$')
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
ON_RANKS = re.compile(r"^<!-- on (\d+) ranks -->$")


@dataclass
class Block:
    """One block of code on a page.

    ``not_run`` is the reason in a comment ``<!-- not run: … -->`` above it, ``ranks`` the number in
    ``<!-- on 2 ranks -->``. ``output`` is the ``text`` block that follows at once: what it prints.
    ``file`` is the title of a block that shows a whole file of the repository.
    """

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None = None
    ranks: int | None = None
    output: str | None = None
    file: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[str]:
        """The command lines of a block of shell, without comments, continued lines joined."""
        for line in self.code.replace("\\\n", " ").split("\n"):
            if command := re.sub(r"(?:^|\s+)#\s.*$", "", line).strip():
                yield command


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").split("\n")
    above, start, last = "", None, None
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if start is None and fence:
            start, language, file = number, fence[1], fence[2]
        elif start is not None and line == "```":
            code = "\n".join(lines[start + 1 : number]) + "\n"
            if language == "text" and last is not None and above == "":
                last.output = code
            last = _block(page, start + 1, language, code, above)
            last.file = file
            found.append(last)
            start, above = None, ""
        elif start is None and line.strip():
            above = line.strip()
    return found


def _block(page: Path, line: int, language: str, code: str, above: str) -> Block:
    not_run, ranks = NOT_RUN.match(above), ON_RANKS.match(above)
    return Block(
        page,
        line,
        language,
        code,
        not_run=not_run[1] if not_run else None,
        ranks=int(ranks[1]) if ranks else None,
    )
