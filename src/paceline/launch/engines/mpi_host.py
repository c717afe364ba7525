"""What mpirun starts on every host: ``python -m paceline.launch.engines.mpi_host WORDS``.

It runs ``paceline`` with those words, and stands between it and mpirun:

- without the variables of mpirun: they number the hosts, and whoever reads them in a rank would
  take them for the number of that rank;
- SIGUSR2 is passed on as SIGTERM, see ``Mpi.leave``;
- nothing outlives mpirun, however that ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from types import FrameType

_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDI_", "HYDRA_", "I_MPI_", "ORTE_")
_PASSED_ON = {
    signal.SIGUSR2: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
}
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the launcher of this host to its end, and leave with its exit status.

    With 0 where it was told to leave: mpirun would take anything else for a failure,
    and end the other hosts before they have saved.
    """
    words = json.loads(sys.argv[1])
    for name in [name for name in os.environ if name.startswith(_OF_MPI)]:
        del os.environ[name]
    die_with_parent(signal.SIGTERM)
    told_to_leave = False
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        start_new_session=True,  # mpirun sends signals to this group, and they end what they reach
        preexec_fn=_begin_launcher,
    )

    def pass_on(signum: int, frame: FrameType | None) -> None:
        nonlocal told_to_leave
        told_to_leave |= _PASSED_ON[signal.Signals(signum)] is signal.SIGTERM
        process.send_signal(_PASSED_ON[signal.Signals(signum)])

    for signum in _PASSED_ON:
        signal.signal(signum, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    code = process.wait()
    sys.exit(0 if told_to_leave else code if code >= 0 else 128 - code)


def die_with_parent(signum: int) -> None:
    """Have the kernel send this process ``signum`` when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)


def _begin_launcher() -> None:
    die_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


if __name__ == "__main__":
    main()
