"""A barrier that names the ranks which did not come, with the help of the world's store."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.errors import CollectiveMismatch, WorldError
from paceline.world.agreement import agree_on_call, explained
from paceline.world.group import Group


class Barrier:
    """The barriers of one world. Without a store (``None``), nobody can be named."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._count = 0

    def wait(
        self, group: Group, name: str, timeout: timedelta | None, problem: WorldError | None
    ) -> None:
        """Wait until every member of ``group`` is here; ``name`` is what the call is called."""
        if self._store is None or group.size == 1:
            agree_on_call(group, name, checks=True, problem=problem, timeout=timeout)
            return
        self._count += 1
        keys = [f"{name}/{self._count}/{rank}" for rank in group.ranks]
        with explained(group, name):
            self._store.set(keys[group.rank], "here")
        try:
            if timeout is not None and timeout > group.timeout:
                # Longer than any collective may take: wait at the store, which has the patience.
                with explained(group, name, timeout):
                    self._store.wait(keys, timeout)
            agree_on_call(group, name, checks=True, problem=problem, timeout=timeout)
        except CollectiveMismatch:
            raise
        except WorldError as error:
            missing = self._missing(group, keys)
            if missing:
                raise WorldError(f"{error} Ranks that did not come: {missing}.") from error
            raise
        self._store.delete_key(keys[group.rank])

    def _missing(self, group: Group, keys: list[str]) -> list[int]:
        assert self._store is not None
        try:
            return [
                rank
                for rank, key in zip(group.ranks, keys, strict=True)
                if not self._store.check([key])
            ]
        except RuntimeError:  # rank 0, which may serve the store, is gone as well
            return []
