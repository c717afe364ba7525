"""The exit codes with which a rank, or a launcher, reports why it left; 0 is success."""

from __future__ import annotations

import signal

INTERRUPTED = 128 + signal.SIGINT
"""Saved and left because of a Ctrl-C."""

TOLD_TO_LEAVE = 128 + signal.SIGTERM
"""Saved and left because its launcher got a SIGTERM."""

PEER_LEAVES = 75
"""Saved and left because another machine leaves, or a new world forms: to be started again.

75 is ``EX_TEMPFAIL`` in sysexits.h: a temporary failure, to be tried again."""

SAVED_AND_LEFT = frozenset({TOLD_TO_LEAVE, PEER_LEAVES})
"""What a rank leaves with that was asked to make room for a new world."""

WOULD_RECUR = 78
"""A launcher's, for what starts it again when it fails: that would only repeat the failure.

78 is ``EX_CONFIG`` in sysexits.h. Only where ``PACELINE_SCHEDULED`` is set; a person gets the exit
code of the rank that failed."""

SCHEDULED = "PACELINE_SCHEDULED"
"""The variable that an engine sets where a scheduler starts launchers again by their exit codes."""
