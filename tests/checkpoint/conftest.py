"""A real S3 server on this machine, small disks to fill, and storages of every kind."""

from __future__ import annotations

import logging
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """What ``open_storage`` needs to reach the server; the bucket is called ``bucket``."""
    import boto3
    from botocore.config import Config
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
        config=Config(proxies={}),
    )
    client.create_bucket(Bucket="bucket")
    client.close()
    yield {
        "key": "test",
        "secret": "test",
        "endpoint_url": endpoint,
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
    server.stop()


@pytest.fixture
def s3_url() -> str:
    """An empty folder of its own in the bucket."""
    return f"s3://bucket/{uuid.uuid4().hex}"


@pytest.fixture
def memory_url() -> Iterator[str]:
    """A folder in fsspec's file system in memory: an object store without a network."""
    import fsspec

    name = uuid.uuid4().hex
    yield f"memory://{name}"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """``mount(size="1m")``: a disk of its own; ``mount.again("ro")`` is what a failing one does."""
    disks = _Disks(tmp_path)
    yield disks
    disks.unmount()


class _Disks:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounted: list[Path] = []

    def __call__(self, size: str) -> Path:
        path = self.folder / f"disk{len(self.mounted)}"
        path.mkdir()
        _as_root("mount", "-t", "tmpfs", "-o", f"size={size}", "paceline-test", str(path))
        self.mounted.append(path)
        return path

    def again(self, path: Path, options: str) -> None:
        _as_root("mount", "-o", f"remount,{options}", str(path))

    def unmount(self) -> None:
        while self.mounted:
            _as_root("umount", "--lazy", str(self.mounted.pop()))


def _as_root(*command: str) -> None:
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    subprocess.run([*prefix, *command], check=True, capture_output=True)
