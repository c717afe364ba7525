"""A griffe extension: Sphinx roles in docstrings become code in the Markdown of the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")


class DocstringRoles(griffe.Extension):
    """Writes ``:class:`World``` as code, which Markdown has no role for."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of ``obj``, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
