"""Numbers and choices for people: losses, times, sizes, rates, counts, lists of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence


def one_of(choices: Iterable[object]) -> str:
    """What a value must be, after "must be": "one of fp32, bf16"; of one choice, that."""
    found = list(choices)
    return f"one of {', '.join(map(str, found))}" if len(found) > 1 else repr(found[0])


def number(value: float) -> str:
    """A loss or a metric, short but not misleadingly so: 2.3457, 1.2e-05, nan."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}" if math.isfinite(value) else str(value)
    return f"{value:.3g}"


def three_digits(value: float) -> str:
    """Three significant digits, never in powers of ten: 1234, 12.3, 0.0123."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) < 1e-6:
        return "0"
    text = f"{value:.3g}"
    if "e" in text:
        text = f"{value:.8f}".rstrip("0")
    return text


def duration(seconds: float) -> str:
    """How long something took: 0.4 s, 41 s, 2:05, 1:02:03."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else clock(whole)


def clock(seconds: float) -> str:
    """A time to wait: 0:05, 12:40, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def short_time(seconds: float) -> str:
    """A time that may be very short: 120 µs, 35 ms, 1.2 s."""
    if seconds < 1e-3:
        return f"{three_digits(seconds * 1e6)} µs"
    return f"{three_digits(seconds * 1e3)} ms" if seconds < 1 else f"{three_digits(seconds)} s"


def rate(per_second: float) -> str:
    """A throughput: 0.25, 8.3, 1,234."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.3g}"


def samples_per_second(per_second: float) -> str:
    """A training throughput: 8.3 samples/s."""
    return f"{rate(per_second)} samples/s"


def byte_rate(bytes_per_second: float) -> str:
    """A bandwidth: 5 kB/s, 12.5 MB/s, 120 GB/s."""
    for unit, amount in (("kB/s", 1e3), ("MB/s", 1e6)):
        if bytes_per_second < 1000 * amount:
            return f"{three_digits(bytes_per_second / amount)} {unit}"
    return f"{three_digits(bytes_per_second / 1e9)} GB/s"


def size(count: int) -> str:
    """A file size: 512 B, 3.2 MB."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def binary_size(count: float) -> str:
    """A size of memory or of a message: 64 KiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1023.5 or unit == "TiB":
            break
        count /= 1024
    return f"{three_digits(count)} {unit}"


def count(amount: int) -> str:
    """A number of parameters: 512, 12.3k, 3.2M, 1.3B."""
    amount_left = float(amount)
    for unit in ("", "k", "M"):
        if amount_left < 1000:
            return f"{amount_left:.0f}" if not unit else f"{amount_left:.1f}{unit}"
        amount_left /= 1000
    return f"{amount_left:.1f}B"


def plural(amount: int, noun: str, nouns: str = "") -> str:
    """1 rank, 2 ranks; ``nouns`` where the plural takes more than an s."""
    return f"{amount} {noun if amount == 1 else nouns or noun + 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1 and 2``, ``ranks 0 to 7``."""
    ranks = sorted(ranks)
    if not ranks:
        return "no rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and all(b == a + 1 for a, b in itertools.pairwise(ranks)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) > 12:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}, …)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
