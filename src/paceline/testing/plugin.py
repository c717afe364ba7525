"""The pytest plugin: live ranks as a fixture, world sizes as a marker, leak checks.

Loaded in every pytest run of whoever has Paceline installed, so it imports nothing heavy and does
nothing until one of its fixtures is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from paceline.testing.pool import RankPool


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "world(size, ...): the number of ranks the `ranks` fixture runs on; with several sizes the "
        "test runs once for each.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses ``ranks`` once for each size in its ``world`` marker."""
    if "ranks" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("world")
    if marker is not None:
        sizes = _sizes(marker, metafunc.definition.nodeid)
        metafunc.parametrize("world_size", sizes, ids=[f"world{size}" for size in sizes])


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The pool of live ranks that all tests of the session share."""
    from paceline.testing.pool import RankPool

    # Rewritten assertions of test modules refer to pytest: have it ready in every rank.
    with RankPool(preload=["pytest"]) as pool:
        yield pool


@pytest.fixture
def world_size() -> int | None:
    """The number of ranks of this test, from its ``world`` marker; ``None`` without one."""
    return None  # with a marker, the parametrisation above takes its place


@pytest.fixture
def ranks(rank_pool: RankPool, world_size: int | None) -> Ranks:
    """Live ranks: ``ranks(fn, *args)`` runs ``fn`` on as many as the test's marker says."""
    return Ranks(rank_pool, world_size)


class Ranks:
    """What the ``ranks`` fixture gives: call it to run a function on every rank of the test."""

    def __init__(self, pool: RankPool, world_size: int | None) -> None:
        self.pool = pool
        self.world_size = world_size

    def __call__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world_size: int | None = None,
        timeout: float | None = None,
        join: bool = True,
        device: str = "cpu",
        share_gpu: bool = False,
    ) -> list[Any]:
        """``function(*arguments)`` on every rank; their results by rank. See ``RankPool.run``."""
        __tracebackhide__ = True
        size = self.world_size if world_size is None else world_size
        if size is None:
            raise pytest.UsageError(
                "ranks(fn): how many? Mark the test @pytest.mark.world(2), or pass world_size=2."
            )
        return self.pool.run(
            function,
            *arguments,
            world_size=size,
            timeout=timeout,
            join=join,
            device=device,
            share_gpu=share_gpu,
        )

    run = __call__


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves something behind; see ``paceline.testing.leaks``.

    For a whole suite, put ``usefixtures = ["no_leaks"]`` into pytest's settings.
    """
    from paceline.testing.leaks import LeakCheck

    check = LeakCheck()
    yield
    leaks = check.leaks()
    if leaks:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {leak}" for leak in leaks), False)


def _sizes(marker: pytest.Mark, test: str) -> tuple[int, ...]:
    for size in marker.args:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise pytest.UsageError(f"{test}: @pytest.mark.world({size!r}): not a world size.")
    if not marker.args or marker.kwargs:
        raise pytest.UsageError(f"{test}: write world sizes as @pytest.mark.world(2, 3).")
    return marker.args
