"""Reading samples out of shards: what is open, and the blocks that were read last."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.data.shard_formats import BLOCK, ShardFormat, ShardIndex
from paceline.errors import DataError


class ShardReader:
    """Gives sample i of shard s, quickest where each of ``places`` is read from front to back.

    Everything it holds can be made anew: what was dropped costs time and changes nothing. Nothing
    of it travels to another process, where file descriptors would share their position.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        indexes: Sequence[ShardIndex],
        shard_format: ShardFormat,
        places: int,
        window: int,
    ) -> None:
        self._shards, self._indexes, self._format = shards, indexes, shard_format
        self._most_open = places + 4
        self._most_blocks = (places + 4) * -(-window // BLOCK)
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], Sequence[Any]] = OrderedDict()
        # By shard and the block that each would read next.
        self._cursors: OrderedDict[tuple[int, int], Iterator[Sequence[Any]]] = OrderedDict()

    def samples(self, places: Iterable[tuple[int, int]]) -> Iterator[Any]:
        """The samples at these places: a shard, and the number of the sample in it.

        One by one, so that what was decoded is mapped, and gone, before the next is decoded.
        """
        if self._process != os.getpid():
            self._forget()
        blocks, decode = self._blocks, self._format.sample
        for shard, number in places:
            key = (shard, number // BLOCK)
            block = blocks.get(key)
            if block is None:
                block = self._read(*key)
            else:
                blocks.move_to_end(key)
            yield decode(self._open(shard), block[number % BLOCK], number)

    def _read(self, shard: int, wanted: int) -> Sequence[Any]:
        cursor, at = self._cursor(shard, wanted)
        while True:
            block = next(cursor, ())
            self._check(shard, at, block)
            self._keep(self._blocks, (shard, at), block, self._most_blocks)
            at += 1
            if at > wanted:
                self._keep(self._cursors, (shard, at), cursor, self._most_open)
                return block

    def _cursor(self, shard: int, wanted: int) -> tuple[Iterator[Sequence[Any]], int]:
        """Something that reads on from the wanted block, or from one before it; and from which."""
        if (cursor := self._cursors.pop((shard, wanted), None)) is not None:
            return cursor, wanted
        jumps = self._format.from_any_block
        if not jumps:
            before = [at for which, at in self._cursors if which == shard and at < wanted]
            if before:
                return self._cursors.pop((shard, max(before))), max(before)
        cursor = self._format.blocks(self._open(shard), self._indexes[shard], wanted)
        return iter(cursor), wanted if jumps else 0

    def _check(self, shard: int, at: int, block: Sequence[Any]) -> None:
        expected = min(BLOCK, self._indexes[shard].count - at * BLOCK)
        if len(block) < expected:
            raise DataError(
                f"shard {self._format.shown(self._shards[shard])} ended after "
                f"{at * BLOCK + len(block)} samples, but {self._indexes[shard].count} were counted "
                "in it: it has changed, or gives other samples each time. Count it again (remove "
                "the index file, give the right counts)."
            )

    def _open(self, shard: int) -> Any:
        opened = self._opened.get(shard)
        if opened is None:
            opened = self._format.open(self._shards[shard])
            self._keep(self._opened, shard, opened, self._most_open)
        else:
            self._opened.move_to_end(shard)
        return opened

    def _keep(self, held: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
        held[key] = value
        held.move_to_end(key)
        while len(held) > most:
            (old, dropped) = held.popitem(last=False)
            if held is self._opened:
                # Nothing may read on in a file that is closed.
                for cursor in [cursor for cursor in self._cursors if cursor[0] == old]:
                    del self._cursors[cursor]
                close = getattr(dropped, "close", None)
                if close is not None and dropped is not self._shards[old]:
                    close()

    def __getstate__(self) -> dict[str, Any]:
        empty: dict[str, Any] = {
            "_opened": OrderedDict(),
            "_blocks": OrderedDict(),
            "_cursors": OrderedDict(),
        }
        return {**self.__dict__, **empty}
