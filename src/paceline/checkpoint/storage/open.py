"""From a path or a URL to the storage behind it."""

from __future__ import annotations

import os
import re
from typing import Any

from paceline.checkpoint.hashing import XXH3, Digest
from paceline.checkpoint.storage.local import LocalStorage
from paceline.checkpoint.storage.storage import Storage
from paceline.errors import CheckpointError

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:(:|//)")


def open_storage(
    where: str | os.PathLike[str],
    options: dict[str, Any] | None = None,
    digest: Digest = XXH3,
) -> Storage:
    """The storage at a path, a ``file://`` URL, or any other URL that fsspec knows (``s3://…``).

    ``options`` go to the file system behind a URL: credentials, endpoints. See its documentation.
    ``digest``: see ``Storage.digest``.
    """
    storage = _opened(where, options)
    storage.digest = digest
    return storage


def is_url(where: str) -> bool:
    """Whether ``where`` is a URL, or a chain of them (``a::b``), of anything but local files."""
    return _URL.match(where) is not None and not where.startswith("file://")


def _opened(where: str | os.PathLike[str], options: dict[str, Any] | None) -> Storage:
    text = os.fspath(where)
    if is_url(text):
        from paceline.checkpoint.storage.remote import FsspecStorage

        return FsspecStorage(text, options)
    if options:
        raise CheckpointError(
            f"storage options {', '.join(sorted(options))} for {text}: a local folder takes none. "
            "Leave them out, or give a URL such as s3://bucket/folder."
        )
    return LocalStorage(text.removeprefix("file://"))
