"""Two runs never work in one folder, and a dead one is in nobody's way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.folder import Folder
from paceline.checkpoint.storage.lock_holder import FolderLock
from paceline.errors import CheckpointError, StorageError

BEAT = 0.05


@pytest.fixture(params=["local", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> str:
    return str(tmp_path / "run") if request.param == "local" else memory_url


class TestEveryKind:
    def test_the_second_is_refused_with_the_name_of_the_first(self, where: str) -> None:
        with Folder(where).lock("run demo", BEAT), pytest.raises(CheckpointError) as caught:
            Folder(where).lock("run other", 2.0)  # it waits for three of these for a sign of life
        said = str(caught.value)
        me = f"run demo (process {os.getpid()} on {socket.gethostname()}, since 20"
        assert f"{where} is in use by another run: {me}" in said
        assert "choose another run_dir" in said

    def test_released_it_is_free_and_leaves_no_trace(self, where: str) -> None:
        for owner in ("first", "second"):
            with Folder(where).lock(owner, BEAT) as lock:
                lock.check()
            lock.release()
            with pytest.raises(CheckpointError, match="lock"):
                lock.check()
        assert Folder(where).storage.names() == []

    def test_one_that_is_gone_is_noticed(self, where: str) -> None:
        folder = Folder(where)
        with folder.lock("run") as lock:
            folder.storage.delete(".lock")
            _until_lost(lock)


def _until_lost(lock: FolderLock) -> None:
    deadline = time.monotonic() + 60
    while _held(lock):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="Nothing more is written there"):
        lock.check()


def _held(lock: FolderLock) -> bool:
    try:
        lock.check()
    except CheckpointError:
        return False
    return True


class TestLocal:
    def test_the_folder_is_made(self, tmp_path: Path) -> None:
        with Folder(tmp_path / "a/b").lock("run"):
            assert (tmp_path / "a/b/.lock").exists()

    def test_a_folder_replaced_by_another_is_noticed(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "run")
        with folder.lock("run") as lock:
            shutil.rmtree(folder.where)
            with pytest.raises(CheckpointError, match=r"removed or replaced.*no longer mounted"):
                lock.check()
            with Folder(folder.where).lock("another"):  # it is a new folder, after all
                lock.release()
                assert (tmp_path / "run/.lock").exists()

    @pytest.mark.parametrize("text", [b"", b"[1]", b"{half"])
    def test_a_file_without_a_lock_on_it_means_nothing(self, tmp_path: Path, text: bytes) -> None:
        (tmp_path / ".lock").write_bytes(text)
        with Folder(tmp_path).lock("run"):
            assert json.loads((tmp_path / ".lock").read_bytes())["owner"] == "run"

    def test_a_holder_that_has_not_said_who_it_is(self, tmp_path: Path) -> None:
        with open(tmp_path / ".lock", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(CheckpointError, match="has not said who it is"):
                Folder(tmp_path).lock("run")

    def test_a_file_system_without_locks_is_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flock(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.warns(UserWarning, match=r"knows no locks.*no second run") as caught:
            lock = Folder(tmp_path).lock("run")
        assert caught[0].filename == __file__
        lock.check()
        lock.release()

    def test_a_folder_that_cannot_be_written(self, mount: Any) -> None:
        disk = mount("1m")
        mount.again(disk, "ro")
        with pytest.raises(StorageError, match=r"cannot lock .*Read-only file system"):
            Folder(disk).lock("run")

    def test_dies_with_its_process_though_its_workers_live_on(self, tmp_path: Path) -> None:
        """A data loader's workers are forked, and may outlive a killed rank by seconds."""
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        with holder.stdout:
            worker = int(holder.stdout.readline())
            try:
                said = rf"their run \(process {holder.pid} on "
                with pytest.raises(CheckpointError, match=said):
                    Folder(tmp_path).lock("mine")
                holder.send_signal(signal.SIGKILL)
                holder.wait()
                os.kill(worker, 0)  # it is still there
                with Folder(tmp_path).lock("mine") as lock:
                    lock.check()
            finally:
                holder.kill()
                holder.wait()
                os.kill(worker, signal.SIGKILL)


HOLDER = """
import os, sys, time
from paceline.checkpoint.folder import Folder
lock = Folder(sys.argv[1]).lock("their run")
worker = os.fork()
if worker == 0:
    time.sleep(600)
    os._exit(0)
lock.check()
print(worker, flush=True)
time.sleep(600)
"""


class TestRemote:
    def leave(self, where: str, **changed: Any) -> None:
        """A lock as another run would have left it."""
        folder = Folder(where)
        with folder.lock("left behind"):
            text = json.loads(folder.storage.read_bytes(".lock"))
        folder.storage.replace(".lock", json.dumps({**text, "every": BEAT, **changed}).encode())

    def test_of_a_dead_process_here_is_taken_at_once(self, memory_url: str) -> None:
        child = subprocess.Popen(["true"])
        child.wait()
        self.leave(memory_url, pid=child.pid)
        before = time.monotonic()
        with Folder(memory_url).lock("run", beat_s=40.0):  # would wait two minutes
            assert time.monotonic() - before < 60

    def test_of_a_process_whose_number_was_given_to_another(self, memory_url: str) -> None:
        self.leave(memory_url, pid=os.getpid(), started="1")
        before = time.monotonic()
        with Folder(memory_url).lock("run", beat_s=40.0):
            assert time.monotonic() - before < 60

    def test_of_another_machine_is_taken_when_it_stands_still(self, memory_url: str) -> None:
        self.leave(memory_url, machine="another", pid=1)
        before = time.monotonic()
        with Folder(memory_url).lock("run", BEAT) as lock:
            assert time.monotonic() - before > 2 * BEAT
            lock.check()

    def test_that_cannot_be_understood_is_waited_for_like_any(self, memory_url: str) -> None:
        Folder(memory_url).storage.replace(".lock", b"???")
        with Folder(memory_url).lock("run", BEAT) as lock:
            lock.check()

    def beat(self, folder: Folder) -> int:
        """How often the holder has given a sign of life."""
        while not (text := folder.storage.read_bytes(".lock")):
            pass  # it is just being written
        return int(json.loads(text)["beat"])

    def test_it_goes_on_beating(self, memory_url: str) -> None:
        folder = Folder(memory_url)
        with folder.lock("run", BEAT) as lock:
            first, deadline = self.beat(folder), time.monotonic() + 60
            while self.beat(folder) < first + 3:
                assert time.monotonic() < deadline
                time.sleep(BEAT)
            lock.check()

    def test_one_that_another_run_took_over_is_lost_and_left_to_it(self, memory_url: str) -> None:
        folder = Folder(memory_url)
        lock = folder.lock("run")  # it looks when it is asked; a beat might come in between
        self_written = json.loads(folder.storage.read_bytes(".lock"))
        other = {**self_written, "token": "another", "owner": "the new run"}
        folder.storage.replace(".lock", json.dumps(other).encode())
        _until_lost(lock)
        with pytest.raises(CheckpointError, match=r"no longer holds the lock on .*: the new run"):
            lock.check()
        with pytest.raises(CheckpointError, match="the new run"):
            folder.clean()
        lock.release()
        assert json.loads(folder.storage.read_bytes(".lock"))["owner"] == "the new run"

    def test_a_network_that_fails_for_a_while(
        self, memory_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Folder(memory_url)
        with folder.lock("run", BEAT) as lock:
            with monkeypatch.context() as patch:

                def down(*_: object, **__: object) -> None:
                    raise ConnectionError("down")

                patch.setattr(folder.storage.fs, "pipe_file", down)
                time.sleep(4 * BEAT)
            lock.check()
