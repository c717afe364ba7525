"""What mpirun starts on every host: ``python -m paceline.launch.engines.mpi_host WORDS``.

It becomes ``paceline`` with those words, without the variables of mpirun: they number the hosts,
and whoever reads them in a rank would take them for the number of that rank.
"""

from __future__ import annotations

import json
import os
import sys

_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDI_", "HYDRA_", "I_MPI_", "ORTE_")


def main() -> None:
    """Become the launcher."""
    words = json.loads(sys.argv[1])
    for name in [name for name in os.environ if name.startswith(_OF_MPI)]:
        del os.environ[name]
    os.execv(sys.executable, [sys.executable, "-m", "paceline", *words])


if __name__ == "__main__":
    main()
