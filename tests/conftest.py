from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import warm
from paceline.prove.prover import PRELOAD
from paceline.testing import RankPool, leaks

_WORKERS_PER_CORE = 1.5
"""Some tests wait, for processes and for time to pass: more of them than there are cores."""
# A busy machine takes its time for an example, and the same examples fail, or do not, everywhere;
# with --hypothesis-profile=search new ones are tried.
_STEADY = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=True
)
hypothesis.settings.register_profile("steady", _STEADY)
hypothesis.settings.register_profile("search", _STEADY, derandomize=False)
hypothesis.settings.load_profile("steady")
_MODELS = ("gpt2", "llama", "qwen3", "bert", "t5")


def pytest_configure(config: pytest.Config) -> None:
    """Have signals arrive in what tests start, also where this was started in the background.

    A shell without job control makes such commands ignore Ctrl-C, ``nohup`` hang-ups, and all that
    they start inherit it: tests that send one would wait in vain.
    """
    config.addinivalue_line("markers", "cold: Python processes of this test start from scratch.")
    config.addinivalue_line("markers", "waits: most of its time it waits. Such tests come first.")
    config.addinivalue_line("markers", "cluster: it starts a real SLURM, Ray, sshd or mpirun.")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # This process goes on ignoring it. Programs it starts do not: a handler is not inherited.
        signal.signal(signal.SIGHUP, lambda signum, frame: None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many tests side by side as this machine can take; those of a single file in this process.

    Workers take seconds to start, and the tests of a file share what its first one has set up.
    """
    paths = {Path(argument.partition("::")[0]) for argument in config.args}
    if len(paths) == 1 and paths.pop().is_file():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(8, int(_WORKERS_PER_CORE * (cores or 1)) or 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections: they took half of the time.

    What is imported by then lives for ever, so that later ones need not look at it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that wait run one after the other in one worker, beside those that compute.

    Those with a cluster do so in another worker: together they would take longer than all the rest.
    Each worker is first given an equal part of the list, in its order.
    """
    clusters = [item for item in items if item.get_closest_marker("cluster")]
    others = [item for item in items if not item.get_closest_marker("cluster")]
    others.sort(key=lambda item: item.get_closest_marker("waits") is None)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    begin = len(items) // workers  # of the second worker's part
    items[:] = [*others[:begin], *clusters, *others[begin:]]


@pytest.fixture(scope="session", autouse=True)
def _own_records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep in the user's own folder, tests keep in theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _warm_starts() -> Iterator[None]:
    """Python processes that tests start need not import torch each: see tests/warm."""
    if not sys.platform.startswith("linux"):
        yield
        return
    with warm.installed(on_start=leaks.serves_the_session):
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Compute with one thread, as ranks do, here and in what tests start.

    Several would wait for each other, busily, on cores that other tests need.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """As the plugin's, with more patience: several workers share the machine.

    Many tests train models of transformers, which takes longer to import than to train. All share
    one pool: a second one, with other imports, would take seconds to start in each worker.
    """
    models = [f"transformers.models.{name}.modeling_{name}" for name in _MODELS]
    with RankPool(preload=["pytest", *PRELOAD, *models], timeout=180) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _every_test_cleans_up(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[None]:
    """Processes, ports, environment variables, files: a test that leaves any behind fails."""
    if request.node.get_closest_marker("cold") is None:
        yield
        return
    with warm.cold():
        yield
