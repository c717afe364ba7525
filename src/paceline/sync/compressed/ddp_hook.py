"""DDP's gradients through an exchange, beside the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.sync.communication_thread import CommunicationThread
from paceline.sync.compressed.exchange import Exchange


class Hook:
    """To be registered with DDP: each bucket is averaged as soon as its gradients are there.

    Where messages make the host wait (Gloo), a courier carries them while the backward goes on.
    Where they do not (NCCL), they are put on a stream of their own, in the order of the buckets.
    """

    def __init__(self, exchange: Exchange, device: torch.device, *, waits: bool) -> None:
        self.exchange = exchange
        self._device = device
        self.courier = CommunicationThread() if waits else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The future of the bucket's mean; DDP calls it."""
        buffer, slot = bucket.buffer(), bucket.index()
        parameters, gradients = bucket.parameters(), bucket.gradients()

        def carry() -> Tensor:
            self.exchange.average(parameters, gradients, slot)
            return buffer

        if self._stream is None:
            assert self.courier is not None
            return self.courier.send(carry)
        return self._on_stream(carry, buffer)

    def _on_stream(self, carry: Any, buffer: Tensor) -> torch.futures.Future[Tensor]:
        stream = self._stream
        assert stream is not None
        buffer.record_stream(stream)
        ready = torch.cuda.current_stream(self._device).record_event()

        def beside() -> Tensor:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                return carry()

        if self.courier is not None:
            return self.courier.send(beside, stream)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device])
        result = beside()
        with torch.cuda.stream(stream):
            future.set_result(result)
        return future

    def close(self) -> None:
        """End the courier."""
        if self.courier is not None:
            self.courier.close()
