"""A wire that holds packets back or loses them: a program that copies between two TAP devices.

    python -I -S slow_link.py NEAR FAR DELAY_SECONDS LOSS

Started by ``paceline.testing.hosts`` in the namespace of the switch. Prints ``ready`` once the
devices are there; ends when its standard input does, and the devices with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_LARGEST_FRAME = 70_000
_MOST_WAITING = 10_000  # frames in each direction; further ones are lost, as in a real queue


def tap(name: str) -> int:
    """A new TAP device: what is sent to it can be read here, and the other way round."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def carry(near: int, far: int, delay: float, loss: float) -> None:
    """Copy frames in both directions until standard input ends."""
    other = {near: far, far: near}
    waiting: deque[tuple[float, int, bytes]] = deque()
    chance = random.Random(0)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([0, near, far], [], [], pause)
        if 0 in readable and not os.read(0, 1):
            return
        now = time.monotonic()
        for device in readable:
            if device == 0:
                continue
            with contextlib.suppress(BlockingIOError):
                frame = os.read(device, _LARGEST_FRAME)
                if chance.random() >= loss and len(waiting) < _MOST_WAITING:
                    waiting.append((now + delay, other[device], frame))
        while waiting and waiting[0][0] <= now:
            _, device, frame = waiting.popleft()
            # EIO: the device is not up yet. A frame more or less is what this program is about.
            with contextlib.suppress(OSError):
                os.write(device, frame)


def main() -> None:
    """See the module."""
    near, far = tap(sys.argv[1]), tap(sys.argv[2])
    print("ready", flush=True)
    carry(near, far, float(sys.argv[3]), float(sys.argv[4]))


if __name__ == "__main__":
    main()
