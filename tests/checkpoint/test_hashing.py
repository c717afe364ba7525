from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.hashing import BlockHasher, hash_blocks, hashed

CUTS = st.lists(st.integers(0, 300), max_size=8)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300), cuts=CUTS, block=st.integers(1, 97))
def test_how_a_file_is_cut_up_does_not_matter(data: bytes, cuts: list[int], block: int) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [memoryview(data)[a:b] for a, b in itertools.pairwise(edges)]
    hasher = BlockHasher(block)
    passed_on = b"".join(hashed(chunks, hasher))
    entry = hasher.digests()
    assert passed_on == data
    assert entry.size == hasher.size == len(data)
    assert entry.block == block
    assert entry.hashes == hash_blocks(data, block)
    assert len(entry.hashes) == -(-len(data) // block)


def test_the_hash_is_the_one_the_format_names() -> None:
    # What is on disk today must be read by the Paceline of tomorrow.
    hasher = BlockHasher(4)
    hasher.update(b"Paceline")
    assert hasher.digests().hashes == (xxhash.xxh3_128_hexdigest(b"Pace"), hash_blocks(b"line")[0])
    assert xxhash.xxh3_128_hexdigest(b"") == "99aa06d3014798d86001c324468d497f"  # as published
    assert hash_blocks(b"Paceline") == ("65ef3dbc46bbb3bd905783c417e6177f",)


def test_an_empty_file_has_no_blocks() -> None:
    assert BlockHasher().digests().hashes == ()
    assert hash_blocks(b"") == ()


def test_digests_can_be_asked_on_the_way() -> None:
    hasher = BlockHasher(4)
    hasher.update(b"abcdef")
    assert hasher.digests().hashes == hash_blocks(b"abcdef", 4)
    hasher.update(b"gh")
    assert hasher.digests().hashes == hash_blocks(b"abcdefgh", 4)


@pytest.mark.parametrize("size", [3, 5 * 1024 * 1024])
def test_memory_may_be_used_anew_for_the_next_chunk(size: int) -> None:
    buffer = bytearray(size)

    def chunks() -> Iterator[memoryview]:
        for value in range(3):
            buffer[:] = bytes([value]) * size
            yield memoryview(buffer)

    hasher = BlockHasher()
    written = b"".join(map(bytes, hashed(chunks(), hasher)))
    assert hasher.digests().hashes == hash_blocks(written)


def test_typed_memory_counts_in_bytes() -> None:
    hasher = BlockHasher()
    hasher.update(memoryview(b"12345678").cast("I"))
    assert hasher.size == 8


def test_a_writer_that_gives_up_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    pieces = hashed([memoryview(bytes(9 * 1024 * 1024))], BlockHasher())
    next(pieces)
    pieces.close()
    assert set(threading.enumerate()) <= before


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockHasher(0)
