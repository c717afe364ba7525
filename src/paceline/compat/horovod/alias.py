"""``import horovod`` as ``paceline.compat.horovod``: for scripts that stay as they are.

A finder in front of all others answers for ``horovod`` and everything below it with the modules of
this package: the same objects, not copies. Processes that a script starts (the workers of a
``DataLoader``, a program of its own) find the folder ``import_path`` on their path, where a package
``horovod`` installs the same finder.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

THEIRS = "horovod"
OURS = "paceline.compat.horovod"
IMPORT_PATH = str(Path(__file__).parent / "import_path")
"""A folder with a package ``horovod``, which installs the finder in other processes."""

_VARIABLES = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "HOROVOD_CROSS_RANK": "GROUP_RANK",
}
"""Variables of horovodrun that scripts read, and those of ours that say the same."""


def prepare_rank() -> None:
    """Make ``import horovod`` mean Paceline's, here and in processes that this one starts."""
    installed = _installed_horovod()
    if installed is not None and os.environ.get("RANK", "0") == "0":
        print(
            f"--backend horovod: the Horovod installed in {installed} is not used; import horovod "
            f"is {OURS}. To use the installed one, leave --backend out.",
            file=sys.stderr,
            flush=True,
        )
    install()
    for theirs, ours in _VARIABLES.items():
        if ours in os.environ:
            os.environ.setdefault(theirs, os.environ[ours])
    os.environ.setdefault("HOROVOD_HOSTNAME", platform.node())
    sys.path.insert(0, IMPORT_PATH)  # multiprocessing hands it on
    inherited = os.environ.get("PYTHONPATH")
    paths = [IMPORT_PATH, inherited] if inherited else [IMPORT_PATH]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def install() -> None:
    """Put the finder in front of all others; once."""
    if not any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HorovodFinder())


class HorovodFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``horovod.x`` where ``paceline.compat.horovod.x`` is."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for a name of Horovod's; an error for a part of it that is not there."""
        if fullname != THEIRS and not fullname.startswith(f"{THEIRS}."):
            return None
        ours = OURS + fullname.removeprefix(THEIRS)
        found = importlib.util.find_spec(ours)
        if found is None:
            raise ModuleNotFoundError(_not_there(fullname), name=fullname)
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, origin=ours, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module itself, so that a class is one and the same under both names."""
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._specs[spec.name] = module.__spec__
        return module

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of our module, which ``python -m horovod.runner.launch`` runs."""
        ours = OURS + fullname.removeprefix(THEIRS)
        found = importlib.util.find_spec(ours)
        loader = None if found is None else found.loader
        assert isinstance(loader, importlib.abc.InspectLoader)
        return loader.get_code(ours)

    def exec_module(self, module: ModuleType) -> None:
        """It has run already; the import system has just replaced its spec, which comes back."""
        name = THEIRS + module.__name__.removeprefix(OURS)
        module.__spec__ = self._specs.pop(name)


def _installed_horovod() -> str | None:
    """Where an installed Horovod is, if there is one that this process would import."""
    if any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        return None
    found = importlib.util.find_spec(THEIRS)
    if found is None or found.origin is None or Path(found.origin).is_relative_to(IMPORT_PATH):
        return None
    return str(Path(found.origin).parent)


def _not_there(name: str) -> str:
    part = name.removeprefix(f"{THEIRS}.").partition(".")[0]
    other = {
        "tensorflow": "for TensorFlow and Keras use --backend tensorflow",
        "keras": "for TensorFlow and Keras use --backend tensorflow",
        "_keras": "for TensorFlow and Keras use --backend tensorflow",
        "spark": "on a Spark cluster, start the script with --on ssh or --on kubernetes",
        "ray": "on a Ray cluster, start the script with --on ray",
        "mxnet": "MXNet has no counterpart here",
    }
    hint = other.get(part, "see the guide 'Horovod scripts' for the modules that are")
    return f"No module named {name!r} among Paceline's modules for Horovod scripts: {hint}."
