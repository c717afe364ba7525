"""A griffe extension: what our docstrings write and the site's Markdown does not know.

Sphinx roles become code, and ``::`` before a block becomes a colon. Parameters that share a line,
``outer_lr, outer_momentum: …``, become one entry each, so that the build can check every one of
them against the signature.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")
LITERAL = re.compile(r"::$", re.MULTILINE)
SHARED = re.compile(r"^(?P<indent> +)(?P<first>\w+)(?P<others>(?:, \w+)+): ", re.MULTILINE)
NEXT_ENTRY = re.compile(r"\n(?=\s*\n|\s*\w+(?:, \w+)*: |\Z)")


class DocstringRoles(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of ``obj``, if it has one."""
        if obj.docstring is not None:
            text = LITERAL.sub(":", ROLE.sub(r"`\1`", obj.docstring.value))
            obj.docstring.value = one_entry_each(text) if "Args:" in text else text


def one_entry_each(text: str) -> str:
    """``a, b: text`` as an entry for ``a`` and one for ``b`` that refers to it."""
    while shared := SHARED.search(text):
        first, others = shared["first"], shared["others"].strip(", ").split(", ")
        end = NEXT_ENTRY.search(text + "\n", shared.end())
        stop = end.start() if end else len(text)
        entry = f"{shared['indent']}{first}: {text[shared.end() : stop]}"
        more = "".join(f"\n{shared['indent']}{name}: see `{first}`." for name in others)
        text = text[: shared.start()] + entry + more + text[stop:]
    return text
