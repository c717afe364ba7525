"""The exit codes with which a rank says why it left; 0 is: done."""

from __future__ import annotations

import signal

INTERRUPTED = 128 + signal.SIGINT
"""Saved and left because of a Ctrl-C."""

TOLD_TO_LEAVE = 128 + signal.SIGTERM
"""Saved and left because its machine was told to (SIGTERM)."""

PEER_LEAVES = 75
"""Saved and left because another machine leaves, or the world forms anew: start me again.

75 is ``EX_TEMPFAIL`` in sysexits.h: a temporary failure, to be tried again."""

SAVED_AND_LEFT = frozenset({TOLD_TO_LEAVE, PEER_LEAVES})
"""What a rank leaves with that was asked to make room for a new world."""
