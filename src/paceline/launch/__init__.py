"""Turning a config or a script into processes, on one machine or several, and keeping them running.

- Starting ranks: ``local`` (on this machine), ``job`` (what to run), ``agent`` (the elastic
  agent), ``worker_group`` and ``processes`` (the ranks of this node), ``worker`` (in a rank).
- When one fails: ``restart_policy`` (restart or give up), ``failure`` and ``error_report`` (which
  rank, and why), ``outcome`` and ``outcome_store`` (what all launchers agree on), ``exit_codes``,
  ``process_reaper`` (nothing is left behind).
- Several machines: ``rendezvous/`` (how they form a world), ``tunnel``, ``secret``, ``loopback``
  and ``listening`` (who may take part).
- ``environment``: the variables that ranks get, set and read.
- Files: ``run_folder``, ``run_choice``, ``logs``, ``rank_output``.
- Elsewhere: ``engines/`` (SSH, SLURM, Kubernetes, Ray, MPI). ``api`` is ``paceline.launch``, the
  function: calling this package calls it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """So that ``paceline.launch(...)`` is a call and ``paceline.launch.api`` a module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # By name: every module of this package imports it, and must not import the function too.
        return importlib.import_module("paceline.launch.api").launch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
