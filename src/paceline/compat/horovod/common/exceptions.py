"""Horovod's exceptions, by their own names.

::

    RuntimeError
    ├── HorovodInternalError          a collective failed, on this rank or on another
    │   └── NotInitializedError       hvd.init() was not called (also a ValueError)
    └── HostsUpdatedInterrupt         elastic: the hosts of the job have changed
    ValueError
    └── DuplicateNameError            a name that is still in use on this rank
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed; elastic training goes back to its last commit and tries again."""


class NotInitializedError(HorovodInternalError, ValueError):
    """``hvd.init()`` has not been called in this process."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class DuplicateNameError(ValueError):
    """A tensor was submitted under a name that is still being processed on this rank."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed; training goes on from where it is."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(f"the hosts of the job have changed (skip_sync={skip_sync})")
        self.skip_sync = skip_sync
