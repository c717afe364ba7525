"""What of a state that several ranks hold one rank copies: only what it is going to write."""

from __future__ import annotations

import torch.distributed as dist

from paceline.checkpoint.rank_state import Part, RankState
from paceline.checkpoint.sharded import agreement
from paceline.checkpoint.sharded.write_share import Share, plan_share


class OwnShare:
    """Takes away from states what other ranks of ``group`` write.

    Which rank writes what is planned when a rank's state has other names, shapes, dtypes or boxes
    than before. A save plans anew with what is left, and refuses it where that is not everything.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._share: Share | None = None

    def of(self, step: int, state: RankState) -> RankState:
        """``state`` with the boxes that this rank is to write. A collective.

        Where the ranks find no plan it is all of ``state``: the save will say why. Raises
        ``CheckpointError`` where a rank does not answer.
        """
        if agreement.size_of(self._group) == 1:
            return state
        # Objects are given by one rank each, and change their size from save to save.
        tensors = RankState(state.tensors)
        if agreement.any_of([not self._fits(tensors)], self._group)[0]:
            self._share = None
            self._share, _ = plan_share(step, tensors, "", self._group)
        if self._share is None:
            return state
        own = {id(tensor) for tensor in self._share.sources(tensors)}
        if len(own) == sum(len(part.pieces) for part in state.tensors.values()):
            return state
        parts = {
            name: Part(part.shape, part.dtype, tuple(p for p in part.pieces if id(p.tensor) in own))
            for name, part in state.tensors.items()
        }
        return RankState(parts, state.objects)

    def _fits(self, state: RankState) -> bool:
        try:
            return self._share is not None and self._share.fits(state)
        except Exception:  # what is wrong with it, the save tells all ranks: they wait for us here
            return False
