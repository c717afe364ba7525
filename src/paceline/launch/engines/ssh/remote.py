"""What runs on a host: this file's own text, sent to a Python there over ssh's standard input.

It needs nothing but that Python (3.8 or later), so that it can say what else is missing. Nothing
that a user or a config says is ever part of ssh's command line: requests are lines of JSON on
standard input, answers are lines on standard output, behind a token that tells them from what a
login shell prints.

A run's launcher is watched by a *keeper*, a process of its own that outlives the connection. What
both have to say to each other lies in a folder: the launcher's output, orders, and a file that is
touched for as long as the command that started the run is there. Where that stops for ``linger``
seconds the keeper ends the launcher; a shorter loss of the network does no harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import io
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from typing import Any

BOOT = "import sys;s=sys.stdin.buffer;p=s.read(int(s.readline()));exec(p)"
"""What Python is given on the command line: it reads this file from its standard input."""
POLL_SECONDS = 0.1
CHUNK = 1 << 16
MOST_COLLECTED = 256 << 20
SECONDS_AFTER_GRACE = 15.0
VERSIONS = """
import importlib.metadata as m, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
try:
    from paceline.version import __version__ as own
except ImportError:
    own = None
print(json.dumps({"paceline": own, "torch": version("torch")}))
"""

token = ""
requests: queue.Queue[Any] = queue.Queue()
sending = threading.Lock()


# ------------------------------------------------------------- the line to the other side


def reply(answer: dict[str, Any], data: bytes = b"") -> None:
    """Send one answer, and bytes behind it."""
    line = f"{token} {json.dumps(answer)}\n".encode() + data
    with sending:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def read_requests() -> None:
    """In a thread: requests in their order; ``None`` when there will be no more."""
    source = sys.stdin.buffer
    try:
        while line := source.readline():
            request = json.loads(line)
            if "bytes" in request:
                request["payload"] = spool(source, request["bytes"], request["into"])
            requests.put(request)
    except (OSError, ValueError, EOFError):
        pass
    requests.put(None)


def spool(source: Any, size: int, folder: str) -> Any:
    """So many bytes in a file without a name, beside where they belong: /tmp may be small."""
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (handed on)
    while size:
        data = source.read(min(size, CHUNK))
        if not data:
            raise EOFError
        file.write(data)
        size -= len(data)
    file.seek(0)
    return file


def is_cut_off() -> bool:
    """Whether nobody reads what we write any more."""
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))


# ------------------------------------------------------------- before a run


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Whether this host can take part: its Python, its versions, the folders it sees."""
    folder = os.path.expanduser(request["folder"])
    if not os.path.isabs(folder):
        return {"problem": f"launch.ssh.folder={request['folder']!r} is no absolute path there"}
    mine = os.path.join(folder, request["run"])
    os.makedirs(mine, mode=0o700, exist_ok=True)
    python = find_python(request["python"])
    facts = {
        "folder": mine,
        "host": socket.gethostname(),
        "python": python,
        "sees": {mark: os.path.exists(mark) for mark in request["marks"]},
        "ports": [port for port in request["ports"] if is_free(port)],
        "lives": [state["launcher"] for state in living(mine)],
    }
    facts.update(versions(python, request["setup"], request["cwd"]))
    return facts


def find_python(candidates: list[str]) -> str:
    """The first that is here; the last is looked for when the launcher is started."""
    for name in candidates[:-1]:
        if shutil.which(os.path.expanduser(name)):
            return os.path.expanduser(name)
    return os.path.expanduser(candidates[-1])


def versions(python: str, setup: Any, cwd: str) -> dict[str, Any]:
    """What the launcher's Python has installed."""
    folder = cwd if os.path.isdir(cwd) else os.path.expanduser("~")
    try:
        done = subprocess.run(
            prepared([python, "-c", VERSIONS], setup),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=folder,
            timeout=120,
        )
        return dict(json.loads(done.stdout.decode().strip().splitlines()[-1]))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        said = done.stderr.decode(errors="replace").strip() if "done" in locals() else str(error)
        return {"problem": f"{python} does not run: {said[-300:] or error}"}


def prepared(command: list[str], setup: Any) -> list[Any]:
    """The command behind what a login shell and the user's own lines set up."""
    if not setup:
        return command
    shell = shutil.which("bash") or "/bin/sh"
    return [shell, "-l", "-c", setup + '\nexec "$@"', "sh", *command]


def is_free(port: int) -> bool:
    """Whether nobody listens on this port, on any address."""
    try:
        with socket.socket() as server:
            server.bind(("", port))
            return True
    except OSError:
        return False


def look(request: dict[str, Any]) -> dict[str, Any]:
    """What the names of other hosts mean here."""
    found = {}
    for name in request["names"]:
        try:
            found[name] = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
        except (OSError, UnicodeError):
            found[name] = []
    return {"addresses": found}


def has(request: dict[str, Any]) -> dict[str, Any]:
    """Whether what would be sent is here."""
    return {"has": os.path.isdir(request["target"])}


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Unpack what was sent into a new folder; one that is there already has the same in it."""
    target = request["target"]
    if not os.path.isdir(target):
        part = tempfile.mkdtemp(prefix=".part-", dir=os.path.dirname(target))
        with tarfile.open(fileobj=request["payload"], mode="r:gz") as archive:
            archive.extractall(part)  # what the user himself has packed
        try:
            os.rename(part, target)
        except OSError:
            shutil.rmtree(part)
            if not os.path.isdir(target):
                raise
    return {}


# ------------------------------------------------------------- a run


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start the keeper, and with it the launcher; then follow it."""
    control = request["control"]
    if request.get("make"):
        os.makedirs(request["make"], exist_ok=True)
    os.makedirs(control, mode=0o700)
    beat(control)
    with open(os.path.join(control, "keeper.log"), "wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-c", BOOT],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    program = globals()["p"]
    assert keeper.stdin is not None
    line = json.dumps({**request, "do": "keep"}).encode() + b"\n"
    keeper.stdin.write(b"%d\n" % len(program) + program + b'{"token": ""}\n' + line)
    keeper.stdin.close()
    while state_of(control) is None:
        if keeper.poll() is not None:
            with open(os.path.join(control, "keeper.log"), encoding="utf-8") as said:
                return {"error": said.read()[-1000:] or "its keeper did not start"}
        time.sleep(0.02)
    return follow({**request, "offset": 0})


def follow(request: dict[str, Any]) -> dict[str, Any]:
    """Send a launcher's output from an offset on, and pass orders to it, until it has ended."""
    control, offset = request["control"], request["offset"]
    if state_of(control) is None:
        return {"exit": None, "why": "nothing is known of it"}
    beat(control)
    with open(os.path.join(control, "output"), "rb") as output:
        output.seek(offset)
        while True:
            state = state_of(control)  # before the output: what it wrote last is then there
            ended = state is not None and ("exit" in state or not is_alive(state))
            moved = send_output(output, all_of_it=ended)
            if ended and not moved:
                state = state_of(control) or {}
                return {"exit": state.get("exit"), "why": state.get("why", "its keeper is gone")}
            take_order(control, POLL_SECONDS if not moved else 0)


def send_output(output: Any, all_of_it: bool) -> bool:
    """Send whole lines; at the end, and of very long ones, also a part."""
    begin = output.tell()
    data = output.read(CHUNK)
    end = len(data) if all_of_it or len(data) == CHUNK else data.rfind(b"\n") + 1
    if len(data) == CHUNK and b"\n" in data:
        end = data.rfind(b"\n") + 1
    output.seek(begin + end)
    if end:
        text = data[:end].decode("utf-8", "replace")
        reply({"output": text, "offset": begin + end})
    return bool(end)


def take_order(control: str, seconds: float) -> None:
    """Do what was asked for while a launcher is followed."""
    try:
        request = requests.get(timeout=seconds) if seconds else requests.get_nowait()
    except queue.Empty:
        return
    if request is None:
        # Our standard input is closed. Either the connection is lost, and the keeper waits for
        # another; or it stands, and the command at its other end is gone for good.
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            if is_cut_off():
                os._exit(0)
            time.sleep(POLL_SECONDS)
        add_order(control, "term")
        os._exit(0)
    if request["do"] == "beat":
        beat(control)
        reply({"alive": True})
    elif request["do"] == "order":
        add_order(control, request["what"])


def beat(control: str) -> None:
    """Note that the command which started the run is there."""
    with open(os.path.join(control, "beat"), "w", encoding="ascii") as file:
        file.write(str(time.monotonic()))


def add_order(control: str, what: str) -> None:
    """Ask the keeper for something."""
    with open(os.path.join(control, "orders"), "a", encoding="ascii") as file:
        file.write(what + "\n")


def order(request: dict[str, Any]) -> dict[str, Any]:
    """Ask all keepers of a run on this host for something; for a command that did not start it."""
    states = living(expanded(request))
    for state in states:
        add_order(state["control"], request["what"])
    return {"launchers": [state["launcher"] for state in states]}


def states(request: dict[str, Any]) -> dict[str, Any]:
    """The launchers of a run that live on this host."""
    return {"launchers": [state["launcher"] for state in living(expanded(request))]}


def expanded(request: dict[str, Any]) -> str:
    """The folder that a run has on this host."""
    return os.path.join(os.path.expanduser(request["folder"]), request["run"])


# ------------------------------------------------------------- the keeper


def keep(request: dict[str, Any]) -> None:
    """Start the launcher and watch over it; this is a process of its own."""
    control = request["control"]
    command = list(request["command"])
    secret = os.path.join(control, "secret")
    if request["secret"] is not None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(secret, flags, 0o600), "w", encoding="ascii") as file:
            file.write(request["secret"] + "\n")
    with open(os.path.join(control, "output"), "ab") as output:
        launcher = subprocess.Popen(
            prepared(command, request["setup"]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=request["cwd"],
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    state = {"keeper": os.getpid(), "born": born(os.getpid()), "launcher": launcher.pid}
    state["host"], state["control"] = socket.gethostname(), control
    save_state(control, state)
    why = watch(launcher, control, request["linger"], request["grace"])
    code = launcher.returncode
    with contextlib.suppress(OSError):
        os.unlink(secret)
    save_state(control, {**state, "exit": 128 - code if code < 0 else code, "why": why})


def watch(launcher: Any, control: str, linger: float, grace: float) -> str:
    """Wait for the launcher's end, pass on orders, and end it where nobody is there for it."""
    last_beat, heard, done = "", time.monotonic(), 0
    ended_at, why = None, ""
    while launcher.poll() is None:
        time.sleep(POLL_SECONDS)
        for what in read(control, "orders").split("\n")[done:-1]:
            done += 1
            with contextlib.suppress(ProcessLookupError):
                if what == "kill":
                    os.killpg(launcher.pid, signal.SIGKILL)
                launcher.send_signal(signal.SIGINT if what == "int" else signal.SIGTERM)
        if (now := read(control, "beat")) != last_beat:
            last_beat, heard = now, time.monotonic()
        if ended_at is None and time.monotonic() - heard > linger:
            ended_at, why = time.monotonic(), f"nothing was heard for {linger:g} s"
            launcher.terminate()
        if ended_at is not None and time.monotonic() - ended_at > grace + SECONDS_AFTER_GRACE:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    return why


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to the launcher where its keeper is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def read(control: str, name: str) -> str:
    """The text of one of the files; none where it is not there."""
    try:
        with open(os.path.join(control, name), encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


def save_state(control: str, state: dict[str, Any]) -> None:
    """Write what is known of a launcher, whole or not at all."""
    path = os.path.join(control, "state")
    with open(path + ".part", "w", encoding="ascii") as file:
        json.dump(state, file)
    os.replace(path + ".part", path)


def state_of(control: str) -> Any:
    """What is known of a launcher; ``None`` where there is none."""
    text = read(control, "state")
    return json.loads(text) if text else None


def living(folder: str) -> list[Any]:
    """The launchers of a run that still run on this host."""
    found = [state_of(path) for path in glob.glob(os.path.join(glob.escape(folder), "host*-*"))]
    return [state for state in found if state and "exit" not in state and is_alive(state)]


def is_alive(state: dict[str, Any]) -> bool:
    """Whether a keeper is there, and is the process that it was."""
    if state["host"] != socket.gethostname():
        return False
    try:
        os.kill(state["keeper"], 0)
    except OSError:
        return False
    return bool(born(state["keeper"]) == state["born"])


def born(pid: int) -> str:
    """When a process was started, by the kernel's clock; and whether it is dead by now."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "dead" if fields[0] in "ZX" else fields[19]


# ------------------------------------------------------------- after a run


def collect(request: dict[str, Any]) -> None:
    """Send the small files of a run: its config, its events, its logs."""
    base, buffer, total = request["path"], io.BytesIO(), 0
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in sorted(glob.glob(os.path.join(glob.escape(base), "**"), recursive=True)):
            name = os.path.relpath(path, base)
            is_log = name.split(os.sep)[0] == "logs"
            if not (is_log or name.endswith((".yaml", ".jsonl"))) or not os.path.isfile(path):
                continue
            total += os.path.getsize(path)
            if total <= MOST_COLLECTED:
                archive.add(path, name, recursive=False)
    data = buffer.getvalue()
    events = os.path.join(base, "events.jsonl")
    written = os.path.getmtime(events) if os.path.exists(events) else 0.0
    left_out = total > MOST_COLLECTED
    reply({"bytes": len(data), "written": written, "left_out": left_out}, data)


def clean(request: dict[str, Any]) -> dict[str, Any]:
    """Remove what a run needed here; its own folder stays."""
    for path in request["paths"]:
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(request["folder"])
    return {}


ACTIONS = {
    action.__name__: action
    for action in (check, look, has, receive, start, follow, order, states, collect, clean, keep)
}


def main() -> None:
    """Answer requests until there are no more."""
    global token
    token = json.loads(sys.stdin.buffer.readline())["token"]
    threading.Thread(target=read_requests, daemon=True).start()
    patience = None
    while True:
        try:
            request = requests.get(timeout=patience)
        except queue.Empty:
            return  # the link is dead, and our side of it does not know
        if request is None:
            return
        # Whoever started a launcher sends a sign of life every few seconds.
        patience = request.get("patience", patience)
        if request["do"] in ("beat", "order") and "control" not in request and "run" not in request:
            continue  # meant for a launcher that has just ended
        try:
            answer = ACTIONS[request["do"]](request)
        except BrokenPipeError:
            return
        except (OSError, tarfile.TarError) as error:
            answer = {"error": str(error)}
        if answer is not None and token:
            reply(answer)


if __name__ == "__main__":
    if importlib.util.find_spec("fcntl") is None or sys.version_info < (3, 8):
        sys.exit("hosts need Linux or another Unix, and Python 3.8 or later")
    main()
    os._exit(0)  # at once: a thread waits for input, which Python would abort over
