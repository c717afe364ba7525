"""``import horovod`` in a process that a script of ``--backend horovod`` has started."""

import importlib
import sys

from paceline.compat.horovod import alias

alias.install()
sys.modules[__name__] = importlib.import_module(alias.OURS)
