"""Results made up, for tests that need no ranks."""

from __future__ import annotations

from paceline.bench.comm_result import CommResult, Inside, LeftOut, Pair, Setting, make_cell

MB = 1e6


def made_up(*, sizes: tuple[int, ...] = (1024, 1048576, 4194304)) -> CommResult:
    """Two machines of two ranks: 1 ms and 100 MB/s across, ten times better within."""
    setting = Setting(["left", "right"], [2, 2], "CPU", "gloo", "float32", "2.13", 0.3)
    groups = {"all": [[0, 1, 2, 3]], "within": [[0, 1], [2, 3]], "across": [[0, 2]]}
    result = CommResult(setting, groups)
    for kind, latency, bandwidth in (
        ("all", 1e-3, 100 * MB),
        ("within", 1e-4, 1000 * MB),
        ("across", 1e-3, 100 * MB),
    ):
        for size in sizes:
            time = latency + size / bandwidth
            names = ("left", "right") if kind == "within" else (kind,)
            count = len(groups[kind][0])
            samples = {name: [[time, time * 1.5, time * 0.9]] * count for name in names}
            result.cells.append(make_cell(kind, "all_reduce", size, 5, samples))
    result.cells.append(make_cell("all", "barrier", 0, 5, {"all": [[0.002]] * 4}))
    result.pairs = [Pair("left", "right", 0.005, 12.5 * MB, 12.6 * MB)]
    result.inside = [
        Inside("left", 1, 5e-5, 1250 * MB, (0, 1), 1250 * MB),
        Inside("right", 1, 4e-5, 1300 * MB, (2, 3), 1300 * MB),
    ]
    result.left_out = [
        LeftOut("all", "reduce", 16 << 20, 8.0),
        LeftOut("all", "broadcast", 64 << 20, 21.0),
        LeftOut("across", "gather", 1024, refused="nccl says: no"),
    ]
    return result
