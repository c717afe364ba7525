"""The pytest plugin, as its users meet it: in a pytest run of their own."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold  # pytest wants to be the first to import its plugins


def run_pytest(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_theirs.py").write_text(textwrap.dedent(code))
    # As a shell starts what is in the background: deaf to Ctrl-C, and after nohup to hang-ups.
    deaf = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh"]
    return subprocess.run(
        [*deaf, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What pytest's summary says of each test."""
    lines = (line.split() for line in done.stdout.splitlines())
    return {
        words[1].partition("::")[2]: words[0]
        for words in lines
        if len(words) > 1 and words[0] in ("PASSED", "FAILED", "ERROR")
    }


def test_ranks_and_world_sizes(tmp_path):
    done = run_pytest(
        tmp_path,
        """
        import os
        import pytest
        import torch
        from paceline.world import World, collectives

        @pytest.mark.world(2)
        def test_one_size(ranks):
            assert ranks(lambda: World.current().size) == [2, 2]

        @pytest.mark.world(1, 3)
        def test_two_sizes(ranks, world_size):
            assert ranks.world_size == world_size
            assert ranks.run(lambda: World.current().size) == [world_size] * world_size

        @pytest.mark.world(1)
        def test_ctrl_c_reaches_ranks(ranks):
            with pytest.raises(Exception) as caught:
                ranks(lambda: os.kill(os.getpid(), 2))
            assert isinstance(caught.value.__cause__, KeyboardInterrupt)

        def test_size_in_the_call(ranks):
            assert ranks.run(lambda: World.current().size, world_size=2) == [2, 2]

        def test_no_size(ranks):
            ranks(lambda: None)

        @pytest.mark.world(2)
        class TestClass:
            @pytest.mark.parametrize("value", [1, 2])
            def test_method(self, ranks, value):
                assert ranks(self.helper, value) == [value] * 2

            def helper(self, value):
                return value

            @pytest.mark.world(3)
            def test_nearest_marker_wins(self, ranks):
                assert len(ranks(os.getpid)) == 3

        @pytest.mark.world(2)
        def test_crash(ranks):
            ranks(os.abort)

        @pytest.mark.world(2)
        def test_after_the_crash(ranks):
            total = ranks(lambda: collectives.all_reduce(torch.ones(1)).item())
            assert total == [2, 2]
        """,
        "--strict-markers",
    )
    assert outcomes(done) == {
        "test_one_size[world2]": "PASSED",
        "test_two_sizes[world1]": "PASSED",
        "test_two_sizes[world3]": "PASSED",
        "test_ctrl_c_reaches_ranks[world1]": "PASSED",
        "test_size_in_the_call": "PASSED",
        "test_no_size": "FAILED",
        "TestClass::test_method[world2-1]": "PASSED",
        "TestClass::test_method[world2-2]": "PASSED",
        "TestClass::test_nearest_marker_wins[world3]": "PASSED",
        "test_crash[world2]": "FAILED",
        "test_after_the_crash[world2]": "PASSED",
    }, done.stdout
    assert "Mark the test @pytest.mark.world(2), or pass world_size=2." in done.stdout
    assert re.search(r"rank [01] of 2 died: killed by SIGABRT", done.stdout)


def test_leaks_are_named_and_do_not_spread(tmp_path):
    done = run_pytest(
        tmp_path,
        """
        import os, socket, subprocess, sys
        import pytest
        import torch
        import torch.distributed as dist

        kept = []

        @pytest.fixture(autouse=True)
        def _clean(no_leaks):
            pass

        def test_process():
            kept.append(subprocess.Popen(["sleep", "611"]))

        def test_orphan():
            subprocess.run(["sh", "-c", "setsid sleep 612 & exit"], check=True)

        def test_port():
            kept.append(socket.create_server(("127.0.0.1", 0)))

        def test_environment(monkeypatch):
            monkeypatch.setenv("PUT_BACK", "1")
            os.environ["LEFT"] = "1"

        def test_file(tmp_path):
            open("left.txt", "w").close()
            (tmp_path / "fine.txt").touch()

        def test_folder(tmp_path):
            os.chdir(tmp_path)

        def test_group():
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)

        def test_dtype():
            torch.set_default_dtype(torch.float64)

        def test_clean():
            assert "LEFT" not in os.environ
            assert not dist.is_initialized()
            assert torch.get_default_dtype() == torch.float32
            subprocess.run(["true"], check=True)

        def test_pools_are_no_leak(ranks):
            assert ranks(os.getpid, world_size=2)
        """,
        "-W",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    )
    text = done.stdout
    leaky = ("process", "orphan", "port", "environment", "file", "folder", "group", "dtype")
    for name in leaky:
        assert f"ERROR test_theirs.py::test_{name} " in text, text
    assert done.stdout.count("the test left behind:") >= len(leaky)
    assert "PASSED test_theirs.py::test_clean" in text
    assert "PASSED test_theirs.py::test_pools_are_no_leak" in text
    assert "10 passed, 8 errors" in text
    for words in (
        ": sleep 611",
        ": sleep 612",
        "a socket listening on port ",
        "environment variable LEFT: unset before, '1' now",
        f"file {tmp_path / 'left.txt'}",
        f"(was {tmp_path})",
        "torch's default process group",
        "torch's default dtype torch.float64 (was torch.float32)",
    ):
        assert words in text


def test_unused_it_imports_nothing_heavy(tmp_path):
    done = run_pytest(
        tmp_path,
        """
        import sys

        def test_light():
            assert "paceline.testing.plugin" in sys.modules
            heavy = ("torch", "cloudpickle", "paceline.testing.pool", "paceline.world")
            assert [name for name in heavy if name in sys.modules] == []
        """,
        "-p",
        "no:hypothesispytest",
    )
    assert outcomes(done) == {"test_light": "PASSED"}, done.stdout


WRONG_MARKERS = {
    "world()": "write world sizes as @pytest.mark.world(2, 3).",
    "world(0)": "@pytest.mark.world(0): not a world size.",
    "world('2')": "@pytest.mark.world('2'): not a world size.",
    "world(size=2)": "write world sizes as @pytest.mark.world(2, 3).",
}


def test_wrong_markers_stop_the_collection(tmp_path):
    for number, marker in enumerate(WRONG_MARKERS):
        code = f"import pytest\n\n@pytest.mark.{marker}\ndef test_it(ranks):\n    pass\n"
        (tmp_path / f"test_{number}.py").write_text(code)
    done = run_pytest(tmp_path, "def test_right(): pass")
    assert done.returncode != 0
    for number, message in enumerate(WRONG_MARKERS.values()):
        assert f"test_{number}.py::test_it: {message}" in done.stdout + done.stderr


def test_ctrl_c_reaches_what_tests_of_this_suite_start(tmp_path):
    own = Path(__file__).parents[1]
    (tmp_path / "conftest.py").write_text((own / "conftest.py").read_text())
    done = run_pytest(
        tmp_path,
        """
        import signal, subprocess, sys
        import pytest

        CODE = "import signal; print([signal.getsignal(n) == signal.SIG_IGN for n in (1, 2)])"

        @pytest.mark.parametrize("start", [pytest.param("cold", marks=pytest.mark.cold), "warm"])
        def test_child(start):
            done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
            assert done.stdout == "[False, False]\\n"
        """,
        *("-o", f"pythonpath={own}"),
    )
    assert outcomes(done) == {"test_child[cold]": "PASSED", "test_child[warm]": "PASSED"}, (
        done.stdout
    )
