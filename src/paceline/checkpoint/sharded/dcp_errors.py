"""Running torch.distributed.checkpoint so that ranks fail alike, by errors of Paceline's."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from paceline.errors import CheckpointDamaged, CheckpointError, is_damage

P = ParamSpec("P")
T = TypeVar("T")

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


class RanksFailed(CheckpointError):
    """A rank failed, and all ranks know."""


class RanksFoundDamage(RanksFailed, CheckpointDamaged):
    """The same, and what every one of them found is damage."""


def sendable_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Let ``method`` raise nothing but ``CheckpointError`` and ``CheckpointDamaged``.

    What a rank raises is sent to all others, and not every exception survives that.
    """

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except CheckpointError as error:
            # A class derived from it might be one that does not.
            kind = CheckpointDamaged if is_damage(error) else CheckpointError
            raise kind(str(error)) from error
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise CheckpointError(
                f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
            ) from error

    return wrapper


def run_dcp(what: str, call: Callable[..., T], group: dist.ProcessGroup | None, **named: Any) -> T:
    """``call``, one of ``dcp.save`` and ``dcp.load``, by all ranks of ``group``.

    Without a group, by this process alone. A rank that fails makes all ranks raise the same
    ``RanksFailed``; one that dies makes the others raise ``CheckpointError`` within the
    timeout of the group.
    """
    if group is None:
        _expect_to_be_alone()
    try:
        return call(process_group=group, no_dist=group is None, **named)
    except CheckpointException as failed:
        raise _first_failure(what, failed, group) from failed
    except Exception as error:
        raise CheckpointError(
            f"{what} failed: another rank did not answer. It died, or took longer than the timeout "
            f"of the group. ({type(error).__name__}: {error})"
        ) from error


def _first_failure(
    what: str, failed: CheckpointException, group: dist.ProcessGroup | None
) -> BaseException:
    own = failed.failures.get(0 if group is None else dist.get_rank(group))
    if own is not None and not isinstance(own[0], Exception):
        return own[0]  # Ctrl-C stays what it is
    rank, (error, _) = min(failed.failures.items(), key=lambda failure: failure[0])
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    by = "" if group is None else f" on rank {rank}"
    all_damage = all(isinstance(e, CheckpointDamaged) for e, _ in failed.failures.values())
    kind = RanksFoundDamage if all_damage else RanksFailed
    return kind(f"{what} failed{by}: {text}")


def _expect_to_be_alone() -> None:
    """Keep torch from warning that it was asked to work without a process group.

    A filter that stays: taking it back would bring out again, at each save, the warnings that
    Python shows once, and a save may run in a thread beside others that change filters.
    """
    if not any(getattr(known[1], "pattern", None) == _ALONE for known in warnings.filters):
        warnings.filterwarnings("ignore", message=_ALONE)
