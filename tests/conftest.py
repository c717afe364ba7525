from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _every_test_cleans_up(no_leaks: None) -> None:
    """Processes, ports, environment variables, files: a test that leaves any behind fails."""
