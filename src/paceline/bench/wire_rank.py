"""``python -m paceline.bench.wire_rank REQUEST FILE``: one rank of ``bench wire``.

The first rank of each machine writes the result to FILE, anew after each trial.
"""

from __future__ import annotations

import sys

from paceline.bench.comm_rank import leave_at_once, say, write_result
from paceline.bench.wire import Trials
from paceline.bench.wire_request import WireRequest
from paceline.bench.wire_result import WireResult
from paceline.config import load
from paceline.world import World


def main(arguments: list[str]) -> None:
    """Join the world, try, write."""
    text, file = arguments
    leave_at_once()  # results are written already
    request = WireRequest.from_json(text)
    launch = load(request.config).launch
    with World.init(device=launch.device, timeout=launch.timeout, hang_after=0) as world:

        def keep(result: WireResult) -> None:
            if world.local_rank == 0:
                write_result(file, result.to_dict())

        trials = Trials(world, request, say if world.rank == 0 else lambda text: None, keep)
        trials.run()


if __name__ == "__main__":
    main(sys.argv[1:])
