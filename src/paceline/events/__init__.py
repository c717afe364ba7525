"""What a run reports about itself: typed events, written as JSON lines.

The trainer and the launcher write them; the progress bar, TensorBoard, MLflow, ``History`` and
``paceline diagnose`` read them, and ask the run nothing else.

``read`` skips an event that this version does not know (a newer one wrote it) and drops fields
that it does not know, so that an old reader can follow a newer run.
"""

from paceline.events.checkpoints import CheckpointFailed, CheckpointSaved, RestoreTried
from paceline.events.event import Event, kind_of
from paceline.events.log import (
    FILE_NAME,
    LONGEST_LINE,
    MOST_BYTES,
    EventLog,
    EventsLost,
    append,
    read,
    read_log_lines,
)
from paceline.events.measurements import MemoryMeasured, StepSplit, Straggler, WireUsed
from paceline.events.ranks import (
    GaveUp,
    HangFound,
    HangOver,
    NodeJoined,
    NodeLeft,
    RankLost,
    RanksStarted,
    Restarting,
    RunFailed,
)
from paceline.events.training import (
    Baseline,
    EpochDone,
    EvalDone,
    Logged,
    MediaLogged,
    NonFinite,
    Note,
    PhaseProgress,
    RunFinished,
    RunStarted,
    StepDone,
)

__all__ = [
    "FILE_NAME",
    "LONGEST_LINE",
    "MOST_BYTES",
    "Baseline",
    "CheckpointFailed",
    "CheckpointSaved",
    "EpochDone",
    "EvalDone",
    "Event",
    "EventLog",
    "EventsLost",
    "GaveUp",
    "HangFound",
    "HangOver",
    "Logged",
    "MediaLogged",
    "MemoryMeasured",
    "NodeJoined",
    "NodeLeft",
    "NonFinite",
    "Note",
    "PhaseProgress",
    "RankLost",
    "RanksStarted",
    "Restarting",
    "RestoreTried",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "StepDone",
    "StepSplit",
    "Straggler",
    "WireUsed",
    "append",
    "kind_of",
    "read",
    "read_log_lines",
]
