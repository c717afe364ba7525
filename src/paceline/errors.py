"""Every error Paceline raises on purpose.

Each message names the value that was found, the rule it breaks and what to do next.

    PacelineError
    ├── ConfigError (ValueError)          a config file, an override or a command-line value
    ├── LayoutError (ValueError)          a layout that cannot be parsed or does not fit its world
    ├── DataError (ValueError)            a dataset, a batch or a loader setting
    │   └── UnknownLength (TypeError)     len() of a loader whose data does not say
    ├── LossError (ValueError)            what a loss function or a model returned
    ├── TrainingError (ValueError)        a call to the engine or the trainer that makes no sense
    ├── WorldError (RuntimeError)         joining a world: environment, backend, device, seeding
    │   └── CollectiveMismatch            ranks called different collectives, shapes or dtypes
    ├── NonFiniteError (ArithmeticError)  NaN or Inf in the loss or the gradients
    ├── CheckpointError (RuntimeError)    a checkpoint that cannot be written, found or read
    │   ├── CheckpointDamaged             its bytes are not those that were written
    │   ├── NotSaved                      a run has ended, and its last state could not be saved
    │   ├── KeyNeeded                     it was written with a key, and none was given
    │   └── StorageError                  the disk or the store refused: full, read-only, gone
    ├── LaunchError (RuntimeError)        processes that could not be started
    │   └── RankFailed                    a rank died; carries its rank, exit code and traceback
    └── MissingExtra (ImportError)        an optional package that is not installed
"""

from __future__ import annotations

from collections.abc import Sequence


class PacelineError(Exception):
    """The root: ``except PacelineError`` catches everything Paceline raises on purpose."""


class ConfigError(PacelineError, ValueError):
    """One or more problems in a config; ``problems`` holds one message each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        super().__init__("\n".join(self.problems))


class LayoutError(PacelineError, ValueError):
    """A layout that cannot be parsed, or that does not fit the world or the model."""


class DataError(PacelineError, ValueError):
    """A dataset, a batch or a loader setting that cannot be used."""


class UnknownLength(DataError, TypeError):
    """``len()`` of a loader over a stream; a ``TypeError`` too, so that ``list()`` copes."""


class LossError(PacelineError, ValueError):
    """What a loss function, or a model that returns its own loss, gave back."""


class TrainingError(PacelineError, ValueError):
    """A call to the engine or the trainer that makes no sense."""


class WorldError(PacelineError, RuntimeError):
    """The world could not be joined: environment, backend, device or seeding."""


class CollectiveMismatch(WorldError):
    """Ranks met in one collective with different operations, shapes or dtypes."""


class NonFiniteError(PacelineError, ArithmeticError):
    """NaN or Inf: ``what`` (loss or gradients), at which ``step``, on which ``ranks``."""

    def __init__(self, message: str, *, step: int, what: str, ranks: Sequence[int] = ()) -> None:
        self.step = step
        self.what = what
        self.ranks = tuple(ranks)
        super().__init__(message)


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint that cannot be written, found or read."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint whose bytes are not those that were written, or not all there."""


class NotSaved(CheckpointError):
    """A run came to its end, but what it learned last could not be saved."""


class KeyNeeded(CheckpointError):
    """A checkpoint that was written with a key, and cannot be checked without it."""


class StorageError(CheckpointError):
    """The storage refused: no space, read-only, no rights, gone. Says nothing of the bytes in it.

    ``unreadable`` is true where a medium could not give back the bytes of one file.
    """

    def __init__(self, message: str, *, unreadable: bool = False) -> None:
        self.unreadable = unreadable
        super().__init__(message)


def is_damage(error: CheckpointError) -> bool:
    """Whether it reports bytes that are lost for good, so that an older checkpoint must do."""
    return isinstance(error, CheckpointDamaged) or (
        isinstance(error, StorageError) and error.unreadable
    )


class LaunchError(PacelineError, RuntimeError):
    """The processes of a run could not be started."""


class RankFailed(LaunchError):
    """A rank died: ``rank``, ``exit_code`` (negative for a signal) and its ``traceback``.

    ``would_recur``: started again as it is, it would end the same way.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        exit_code: int,
        traceback: str = "",
        would_recur: bool = False,
    ) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback
        self.would_recur = would_recur
        super().__init__(message)

    def followed_by(self, text: str) -> RankFailed:
        """The same error, with what to do next on lines of its own."""
        return RankFailed(
            f"{self}\n{text}",
            rank=self.rank,
            exit_code=self.exit_code,
            traceback=self.traceback,
            would_recur=self.would_recur,
        )


class MissingExtra(PacelineError, ImportError):
    """An optional package that is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} is not installed. Install it with: pip install 'paceline[{extra}]'"
        )
