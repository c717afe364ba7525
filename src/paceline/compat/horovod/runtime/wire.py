"""How messages travel between rank 0 and the others: point to point over a Gloo group."""

from __future__ import annotations

import torch
import torch.distributed as dist

_TAG = 0


class Wire:
    """Bytes to and from the other members of ``group``; one thread for each direction and peer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, peer: int, data: bytes) -> None:
        """Hand ``data`` to ``peer``; raises RuntimeError when it is gone."""
        header = torch.tensor([len(data)], dtype=torch.int64)
        self._group.send([header], peer, _TAG).wait()
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._group.send([payload], peer, _TAG).wait()

    def receive(self, peer: int) -> bytes:
        """The next message of ``peer``; raises RuntimeError when it is gone."""
        header = torch.empty(1, dtype=torch.int64)
        self._group.recv([header], peer, _TAG).wait()
        payload = torch.empty(int(header), dtype=torch.uint8)
        self._group.recv([payload], peer, _TAG).wait()
        return payload.numpy().tobytes()
