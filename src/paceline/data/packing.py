"""Putting documents together so that they fill sequences of one length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class Packing:
    """Which pieces of a text make each sequence."""

    def __init__(self, starts: Numbers, stops: Numbers, first: Numbers) -> None:
        self._starts, self._stops = starts, stops
        self._first = first  # sequence i has the pieces from first[i] to first[i + 1]

    def __len__(self) -> int:
        return len(self._first) - 1

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """The pieces of one sequence, as places in the text."""
        part = slice(self._first[index], self._first[index + 1])
        return list(zip(self._starts[part].tolist(), self._stops[part].tolist(), strict=True))


def pack_whole(ends: Numbers, context: int) -> Packing:
    """Pack the documents that end at ``ends`` into sequences of at most ``context`` tokens.

    A longer document is cut into full sequences and a rest. The longest pieces go first, each into
    the sequence that it fills best ("best fit decreasing"); the order of sequences is that of
    their longest pieces in the text.
    """
    starts, stops = _cut(ends, context)
    sizes = stops - starts
    by_size = np.argsort(-sizes, kind="stable")
    sequence_of = np.empty(len(sizes), np.int64)
    full = int((sizes == context).sum())
    sequence_of[by_size[:full]] = np.arange(full)
    rest = by_size[full:]
    sequence_of[rest] = _best_fit(sizes[rest].tolist(), context, full)
    # Sequences were begun by size; they go back to the order of the text.
    leaders = np.full(int(sequence_of.max()) + 1, len(sizes))
    np.minimum.at(leaders, sequence_of, np.arange(len(sizes)))
    renamed = np.empty_like(leaders)
    renamed[np.argsort(leaders, kind="stable")] = np.arange(len(leaders))
    sequence_of = renamed[sequence_of]
    order = np.argsort(sequence_of, kind="stable")
    first = np.searchsorted(sequence_of[order], np.arange(len(leaders) + 1))
    return Packing(starts[order], stops[order], first)


def _cut(ends: Numbers, context: int) -> tuple[Numbers, Numbers]:
    """The pieces of all documents: as many full ones as there are, and a rest."""
    begins = np.concatenate([[0], ends[:-1]])
    pieces = -(-(ends - begins) // context)
    document = np.repeat(np.arange(len(ends)), pieces)
    number = np.arange(len(document)) - np.repeat(pieces.cumsum() - pieces, pieces)
    starts = begins[document] + number * context
    return starts, np.minimum(starts + context, ends[document])


def _best_fit(sizes: list[int], context: int, first: int) -> list[int]:
    """The sequence of each piece; sequences are numbered from ``first`` on."""
    open_by_space: list[list[int]] = [[] for _ in range(context + 1)]
    spaces = 0  # bit s is set where a sequence has s tokens of space left
    chosen = []
    for size in sizes:
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            sequence = open_by_space[space].pop()
            if not open_by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, sequence = context, first
            first += 1
        left = space - size
        if left:
            open_by_space[left].append(sequence)
            spaces |= 1 << left
        chosen.append(sequence)
    return chosen
