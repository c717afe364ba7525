"""What the tests of several launchers share."""

from __future__ import annotations

import pytest
from node_cases import Cluster


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    """The losses of the same run on one machine that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Cluster(folder, slow=False) as alone:
        launcher = alone.start(arguments=["sums.yaml"])
        assert launcher.ends() == 0, launcher.text
        return alone.losses()
