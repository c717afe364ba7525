"""Numbers as people read them."""

from __future__ import annotations

from paceline.formatting import (
    binary_size,
    byte_rate,
    clock,
    count,
    duration,
    number,
    plural,
    ranks_text,
    rate,
    short_time,
    size,
)


def test_numbers_are_short_and_true() -> None:
    assert [number(v) for v in (2.34567, 0.0, -0.5, 1e-5, 123456.0)] == [
        "2.3457",
        "0.0000",
        "-0.5000",
        "1e-05",
        "1.23e+05",
    ]
    assert [duration(s) for s in (0.44, 41.3, 125, 3723)] == ["0.4 s", "41 s", "2:05", "1:02:03"]
    assert [clock(s) for s in (0, 5, 760, 3723)] == ["0:00", "0:05", "12:40", "1:02:03"]
    assert [rate(r) for r in (0.25, 8.333, 1234.5)] == ["0.25", "8.33", "1,234"]
    assert [size(b) for b in (512, 3_200_000, 5 * 10**12)] == ["512 B", "3.2 MB", "5.0 TB"]
    assert [count(n) for n in (512, 12_300, 3_200_000, 13 * 10**8)] == [
        "512",
        "12.3k",
        "3.2M",
        "1.3B",
    ]


def test_quantities_shown() -> None:
    assert [binary_size(s) for s in (12, 1020, 1048572, 3 * 2**29)] == [
        "12 B",
        "1020 B",
        "1 MiB",
        "1.5 GiB",
    ]
    assert [short_time(t) for t in (2e-7, 1.2e-4, 0.0123, 4)] == [
        "0.2 µs",
        "120 µs",
        "12.3 ms",
        "4 s",
    ]
    assert [byte_rate(r) for r in (5e3, 1.25e7, 1.2e11)] == ["5 kB/s", "12.5 MB/s", "120 GB/s"]


def test_ranks_of_a_message_that_no_rank_sent_are_told_without_counting_to_them() -> None:
    assert ranks_text([0, 1, 2, 3]) == "ranks 0 to 3"
    assert ranks_text([]) == "no rank"
    assert ranks_text([0, 1, 10**30]) == f"ranks 0, 1 and {10**30}"


def test_plurals() -> None:
    assert [plural(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert plural(2, "reading process", "reading processes") == "2 reading processes"
