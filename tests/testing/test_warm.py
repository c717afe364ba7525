"""A process that starts warm is what a cold one is, to itself and to whoever started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from paceline.testing.hosts import Hosts, hosts_available
from paceline.testing.processes import ancestors, command_line, was_started_with

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="processes are handed over on Linux only"
)

PROBE = """
import faulthandler, json, logging, os, random, signal, sys, threading, warnings
import numpy, torch
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__,
    "file": globals().get("__file__"), "is main": sys.modules["__main__"].__dict__ is globals(),
    "folder": os.getcwd(), "environ": dict(os.environ),
    "parent": os.getppid(), "leads a session": os.getsid(0) == os.getpid(),
    "handlers": [str(signal.getsignal(n)).partition(" at ")[0] for n in sorted(signal.valid_signals())],
    "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
    "input": sys.stdin.read(),
    "files": [n for n in range(3, 100) if os.path.exists(f"/proc/self/fd/{n}") and
              not os.readlink(f"/proc/self/fd/{n}").startswith("socket:")],
    "command line": open("/proc/self/cmdline").read().rstrip(chr(0)),
    "mark": "MARK=of this test" in open("/proc/self/environ").read().split(chr(0)),
    "mask": os.umask(0o22), "priority": os.getpriority(os.PRIO_PROCESS, 0),
    "threads": threading.active_count(), "torch threads": torch.get_num_threads(),
    "dtype": str(torch.get_default_dtype()),
    "grad": torch.is_grad_enabled(), "debug": str(torch.distributed.get_debug_level()),
    "log": len(logging.getLogger().handlers), "fault": faulthandler.is_enabled(),
    "warnings": [str(f) for f in warnings.filters[-6:]],
}
own = [random.random(), float(numpy.random.rand()), torch.initial_seed()]
print(json.dumps({"seen": seen, "own": own}))
"""


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path


def look(folder: Path, *command: str, **options: Any) -> dict[str, Any]:
    env = {**os.environ, "MARK": "of this test", "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=env, capture_output=True, text=True, input="said", check=True, **options,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "probe", "one", "two words"),
        ("-P", "-c", PROBE, "one"),
        ("-u", "probe.py", "-m", "x"),
    ],
    ids=["module", "code", "script"],
)
def test_a_program_sees_the_same(probe: Path, command: tuple[str, ...]) -> None:
    options: dict[str, Any] = {
        "env": {"PYTHONPATH": f"{probe / 'lib'}:relative", "TORCH_DISTRIBUTED_DEBUG": "INFO"},
        "start_new_session": command[0] == "-P",
    }
    with warm.cold():
        cold = look(probe, *command, **options)
    first, second = look(probe, *command, **options), look(probe, *command, **options)
    assert first["seen"] == cold["seen"]
    assert first["seen"]["parent"] == os.getpid()
    for one, other in zip(first["own"], second["own"], strict=True):
        assert one != other, "what nobody has seeded is left to chance"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
        "import sys; sys.exit('why')",
        "import atexit; atexit.register(print, 'last'); print('first')",
        "def f():\n    raise ValueError('x')\nf()",
        "raise KeyboardInterrupt",
        "import os; print('lost'); os._exit(4)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('end'))).start()",
        "no python",
    ],
)
def test_it_ends_the_same(code: str) -> None:
    def end() -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    found = end()
    with warm.cold():
        assert found == end()


def test_what_it_starts_is_warm_and_its_own_child(tmp_path: Path) -> None:
    inner = (
        "import os, sys, time\n"
        "print(os.getpid(), 'torch' in sys.modules, flush=True)\n"
        "time.sleep(600)"
    )
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", outer],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "MARK": "outer"},
    ) as process:
        assert process.stdout is not None
        pid, is_warm = process.stdout.readline().split()
        found = [
            is_warm == "True",
            ancestors(int(pid))[0] == process.pid,
            command_line(int(pid)).startswith(f"{sys.executable} -c import os, sys, time"),
            was_started_with(int(pid), "MARK", "outer"),
        ]
        os.kill(int(pid), signal.SIGTERM)
        assert process.wait() == 0
    assert all(found), found


@pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available()))
def test_on_another_host(tmp_path: Path) -> None:
    code = (
        "import os, platform, subprocess, sys\n"
        "print(os.getppid(), platform.node(), os.getcwd(), 'torch' in sys.modules, flush=True)\n"
        "if len(sys.argv) < 2: subprocess.run([*sys.orig_argv, 'again'])"
    )
    with Hosts(1, private=[tmp_path]) as hosts:
        command = [sys.executable, "-c", code]
        done = hosts[0].run(command, cwd=tmp_path, capture_output=True, text=True)
    (first, *here), (second, *there) = (line.split() for line in done.stdout.splitlines())
    assert here == there == ["host0", str(tmp_path), "True"]
    assert int(first) == os.getpid()
    assert int(second) != os.getpid()
