"""``python -m paceline.bench.comm_rank REQUEST FILE``: one rank of a measurement.

The first rank of each machine writes the result to FILE, for its launcher to show.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from paceline.bench import comm
from paceline.bench.comm_request import LONGEST, CommRequest
from paceline.world import World

_TIMEOUT = 300.0


def main(arguments: list[str]) -> None:
    """Join the world, measure, write."""
    text, file = arguments
    leave_at_once()
    request = CommRequest.from_json(text)
    patience = max(_TIMEOUT, 10 * LONGEST * request.seconds)
    with World.init(device=request.device, timeout=patience, hang_after=0) as world:
        result = comm.run(world, request, say if world.rank == 0 else lambda text: None)
        if world.local_rank == 0:
            write_result(file, result.to_dict())


def leave_at_once() -> None:
    """End on a signal without delay, even from within a collective: there is nothing to save."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def write_result(file: str, result: dict[str, Any]) -> None:
    """Write the whole file or none of it: the launcher may read it at any time."""
    part = Path(f"{file}.part")
    part.write_text(json.dumps(result), encoding="utf-8")
    os.replace(part, file)


def say(text: str) -> None:
    """Report progress to the launcher."""
    print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
