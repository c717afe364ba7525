"""The pool: results, failures named and survived, nothing carried from one job to the next."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

from paceline.errors import RankFailed, WorldError
from paceline.testing import RankPool
from paceline.testing.processes import is_alive
from paceline.world import World, collectives

LEVEL = 3  # a global of the test module travels with the functions that use it


class Point:
    """A class of the test module."""

    def __init__(self, x: int) -> None:
        self.x = x


def helper(x: int) -> int:
    return x * LEVEL


# ---- what goes in and what comes back


@pytest.mark.world(1, 2, 3, 4)
def test_results_come_back_by_rank(ranks, world_size):
    def job(offset):
        world = World.current()
        return world.rank + offset, world.size, collectives.all_reduce(torch.ones(2)).tolist()

    expected = [(rank + 10, world_size, [world_size] * 2) for rank in range(world_size)]
    assert ranks(job, 10) == expected


@pytest.mark.world(2)
def test_lambdas_closures_and_classes_of_the_test_travel_by_value(ranks):
    captured = Point(5)
    assert ranks(lambda: World.current().rank) == [0, 1]
    assert ranks(lambda: helper(captured.x)) == [15, 15]
    assert ranks(functools.partial(helper, captured.x)) == [15, 15]
    points = ranks(lambda p: Point(p.x + 1), captured)
    assert [type(point) for point in points] == [Point, Point]  # the very class, not a twin
    assert [point.x for point in points] == [6, 6]


@pytest.mark.world(2)
def test_tensors_and_models_come_back_by_value(ranks):
    def job():
        model = torch.nn.Linear(2, 2)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return model, model.weight.grad, torch.ones(3, dtype=torch.bfloat16)[1:], loss.detach()

    model, grad, view, loss = ranks(job)[0]
    assert torch.equal(model(torch.ones(1, 2)).sum(), loss)
    assert grad.tolist() == [[1, 1], [1, 1]]
    assert view.tolist() == [1, 1]
    assert not view.is_shared()


@pytest.mark.world(2)
def test_ranks_see_the_environment_folder_and_path_of_the_caller(
    ranks, monkeypatch, tmp_path, capsys
):
    (tmp_path / "local_helper.py").write_text("VALUE = 42\n")
    monkeypatch.setenv("MY_SETTING", "on")
    monkeypatch.setenv("RANK", "77")  # the caller may itself be a rank of something
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def job():
        import local_helper

        print("seen by", World.current().rank)
        return os.environ["MY_SETTING"], os.getcwd(), local_helper.VALUE, os.environ["RANK"]

    assert ranks(job) == [("on", str(tmp_path), 42, str(rank)) for rank in range(2)]
    assert capsys.readouterr().out == "[rank 0] seen by 0\n[rank 1] seen by 1\n"


@pytest.mark.world(3)
def test_without_joining_a_rank_has_the_launchers_variables_only(ranks):
    def job():
        assert not dist.is_initialized()
        dist.init_process_group("gloo")  # torch's own way in
        return dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"]

    for _ in range(2):  # each job meets at a place of its own
        assert ranks(job, join=False) == [(rank, 3, "3") for rank in range(3)]


# ---- failures


@pytest.mark.world(3)
def test_the_first_rank_to_raise_is_the_one_that_is_shown(ranks):
    def broken_layer(rank):
        raise KeyError(f"rank {rank} has no such layer")

    def job():
        world = World.current()
        if world.rank == 1:
            broken_layer(world.rank)
        collectives.barrier()

    with pytest.raises(RankFailed) as caught:
        ranks(job)
    failure = caught.value
    assert failure.rank == 1
    assert isinstance(failure.__cause__, KeyError)
    assert "in broken_layer" in failure.traceback
    assert "paceline/testing/rank.py" not in failure.traceback
    text = str(failure)
    assert text.startswith("rank 1 of 3 raised KeyError: 'rank 1 has no such layer'")
    assert "(rank 0 raised paceline.errors.WorldError: barrier failed on rank 0" in text
    assert ranks(lambda: World.current().rank) == [0, 1, 2]


class OddError(Exception):
    """An exception that does not survive pickling."""

    def __init__(self, a, b):
        super().__init__("odd")
        self.lock = threading.Lock()


def throw(error: BaseException) -> None:
    raise error


RAISES = {
    "error": (lambda: throw(ValueError("no")), "ValueError: no"),
    "exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "interrupt": (lambda: throw(KeyboardInterrupt()), "KeyboardInterrupt"),
    "unpicklable": (lambda: throw(OddError(1, 2)), "OddError: odd"),
    "result": (lambda: threading.Lock(), "TypeError: the function returned a lock that cannot be"),
    "import": (lambda: __import__("no_such_module"), "ModuleNotFoundError: No module named"),
}


@pytest.mark.parametrize("case", RAISES)
def test_anything_a_function_raises_is_reported(ranks, case):
    function, message = RAISES[case]
    with pytest.raises(RankFailed) as caught:
        ranks(function, world_size=1)
    assert message in str(caught.value).splitlines()[0]


CRASHES = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL", -9),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV", -11),
    "abort": (os.abort, "killed by SIGABRT", -6),
    "exit": (lambda: os._exit(3), "exit code 3", 3),
    "silent exit": (lambda: os._exit(0), "exit code 0", 0),
}


@pytest.mark.world(3)
@pytest.mark.parametrize("case", CRASHES)
def test_a_rank_that_dies_is_named_and_replaced(ranks, case):
    crash, message, code = CRASHES[case]

    def job():
        world = World.current()
        if world.rank == 2:
            os.write(2, b"last words\n")
            crash()
        collectives.barrier()
        return os.getpid()

    with pytest.raises(RankFailed) as caught:
        ranks(job)
    assert caught.value.rank == 2
    assert caught.value.exit_code == code
    text = str(caught.value)
    assert text.startswith(f"rank 2 of 3 died: {message}")
    assert "It had printed:\nlast words" in text
    assert ranks(lambda: World.current().rank) == [0, 1, 2]


@pytest.mark.world(2)
def test_a_cpp_terminate_shows_what_the_rank_was_doing(ranks):
    def job():
        # What Gloo does with sizes that differ, when nobody checks: the process is gone.
        rank = World.current().rank
        dist.all_reduce(torch.ones(1000 * (rank + 1)))

    with pytest.raises(RankFailed) as caught:
        ranks(job)
    assert "died: killed by SIGABRT" in str(caught.value)
    assert "terminate called" in str(caught.value)
    assert "all_reduce" in caught.value.traceback  # the Python stack at the moment of death


@pytest.mark.world(3)
def test_a_hang_shows_the_stack_of_every_rank_that_is_stuck(ranks):
    def stuck_in_here():
        time.sleep(600)

    def job():
        if World.current().rank == 0:
            return
        stuck_in_here() if World.current().rank == 1 else collectives.barrier()

    for limit in (1, 10, 60):  # a busy machine may need longer until all others are done
        with pytest.raises(RankFailed) as caught:
            ranks(job, timeout=limit)
        text = str(caught.value)
        if "in stuck_in_here" in text and "(rank 0 had finished)" in text:
            break
    assert text.startswith(f"rank 1, 2 of 3 did not finish within {limit} s and was stopped.")
    first, second = text.split("rank 2 was here:")
    assert "in stuck_in_here" in first
    assert "in barrier" in second
    assert "(rank 0 had finished)" in second
    assert "paceline/testing/rank.py" not in text
    assert ranks(lambda: World.current().rank) == [0, 1, 2]


@pytest.mark.world(2)
def test_processes_left_behind_fail_the_job_and_are_ended(ranks):
    def job():
        if World.current().rank == 1:
            child = subprocess.Popen(["sleep", "600"])
            globals()["keep"] = child
            print(child.pid)

    with pytest.raises(RankFailed, match=r"rank 1 of 2 left behind process \d+ \(sleep 600\)"):
        ranks(job)
    assert ranks(lambda: World.current().rank) == [0, 1]


@pytest.mark.world(1)
def test_the_helpers_of_torch_compile_may_stay(ranks):
    """They end with the rank; here one that looks like them, as they come with a GPU only."""

    def job():
        name = "torch/_inductor/compile_worker/__main__.py"
        globals()["keep"] = subprocess.Popen(["sh", "-c", "sleep 5; true", name])

    ranks(job)


@pytest.mark.world(2)
def test_assertions_in_ranks_explain_themselves(ranks):
    def job():
        values = [1, 2, World.current().rank]
        assert values == [1, 2, 0]

    with pytest.raises(RankFailed) as caught:
        ranks(job)
    assert caught.value.rank == 1
    assert "assert [1, 2, 1] == [1, 2, 0]" in str(caught.value)


@pytest.mark.world(2)
def test_a_forked_child_that_comes_back_from_the_job_is_no_rank(ranks):
    def job():
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert ranks(job) == [1, 1]


# ---- nothing is carried over


@pytest.mark.world(2)
def test_everything_a_job_changes_is_put_back(ranks):
    def look():
        import logging

        return {
            "environ": {k: v for k, v in os.environ.items() if k != "MASTER_PORT"},
            "folder": os.getcwd(),
            "path": sys.path[:],
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "random": (torch.rand(2).tolist(), random.random(), numpy.random.rand()),
            "handler": signal.getsignal(signal.SIGTERM),
            "filters": len(warnings.filters),
            "logging": logging.getLogger().level,
            "stdout": sys.stdout.fileno(),
            "world": World.current().rank,
        }

    def change():
        import logging

        os.environ["LEFT_OVER"] = "1"
        del os.environ["OMP_NUM_THREADS"]
        os.chdir("/")
        sys.path.insert(0, "/nowhere")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        warnings.simplefilter("error")
        logging.getLogger().setLevel(logging.DEBUG)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        World.current().close()

    before, processes = ranks(look), ranks(os.getpid)
    ranks(change)
    assert ranks(look) == before
    assert ranks(os.getpid) == processes


@pytest.mark.world(2)
def test_ranks_live_on_from_job_to_job_unless_something_cannot_be_put_back(ranks):
    def start_thread():
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

    def make_mesh():
        from torch.distributed.device_mesh import init_device_mesh

        init_device_mesh("cpu", (2,))

    def fail():
        with pytest.raises(RankFailed):
            ranks(lambda: 1 / 0)

    assert ranks(os.getpid) == ranks(os.getpid)
    for leave_a_trace in (lambda: ranks(start_thread), lambda: ranks(make_mesh), fail):
        before = ranks(os.getpid)
        leave_a_trace()
        assert not set(ranks(os.getpid)) & set(before)


# ---- the pool itself


def test_wrong_arguments_are_refused(ranks):
    for size in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match=r"world_size=.* must be a whole number, 1 or more"):
            ranks(print, world_size=size)
    for timeout in (0, -1, "soon"):
        with pytest.raises(ValueError, match=r"timeout=.* must be a number of seconds above 0"):
            ranks(print, world_size=1, timeout=timeout)
    with pytest.raises(TypeError, match="run takes a function, not a str"):
        ranks("print", world_size=1)
    with pytest.raises(TypeError, match="cannot be sent to a rank"):
        ranks(print, threading.Lock(), world_size=1)


def test_an_interrupted_job_leaves_a_working_pool(ranks):
    owner = os.getpid()

    def job():
        if World.current().rank == 1:
            os.kill(owner, signal.SIGINT)
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        ranks(job, world_size=2)
    assert ranks(lambda: World.current().rank, world_size=2) == [0, 1]


def test_threads_may_share_a_pool(ranks):
    results: dict[int, list] = {}

    def use(size):
        results[size] = ranks(lambda: World.current().size, world_size=size)

    threads = [threading.Thread(target=use, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {size: [size] * size for size in (1, 2, 3)}


def test_a_pool_outlives_its_server_and_leaves_nothing_when_closed():
    with RankPool(timeout=120) as pool:
        assert pool.server_pid is None  # starts when it is needed
        first = pool.run(os.getpid, world_size=2)
        os.kill(pool.server_pid, signal.SIGKILL)
        wait_until_gone([pool.server_pid, *first])
        second = pool.run(os.getpid, world_size=2)
        assert not set(first) & set(second)
        server = pool.server_pid
    wait_until_gone([*first, *second, server])


def test_no_rank_outlives_a_killed_owner():
    code = """
        import os, signal
        from paceline.testing import RankPool

        pool = RankPool()
        print(pool.server_pid, *pool.run(os.getpid, world_size=2), pool.server_pid, flush=True)
        pool.run(lambda: (print("busy"), __import__("time").sleep(60)), world_size=2)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as owner:
        none, *pids = owner.stdout.readline().split()
        assert none == "None"
        time.sleep(0.3)  # into the second job
        owner.kill()
    wait_until_gone([int(pid) for pid in pids])


def wait_until_gone(pids):
    deadline = time.monotonic() + 120
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.02)


def test_an_error_of_paceline_is_found_as_the_cause(ranks):
    def job():
        collectives.all_reduce(torch.ones(1), "avg")

    with pytest.raises(RankFailed) as caught:
        ranks(job, world_size=1)
    assert isinstance(caught.value.__cause__, WorldError)
