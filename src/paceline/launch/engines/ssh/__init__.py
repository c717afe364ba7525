"""``--on ssh``: a launcher on every host, started and followed over the user's own ssh.

``engine`` is the door; ``preflight`` asks the hosts whether they are ready, ``shipping`` copies
code to them, ``supervisor`` follows the launchers, ``record`` finds them again. ``session`` is a
connection to one host, and ``remote`` what runs at its other end.
"""

from paceline.launch.engines.ssh.engine import SshEngine

__all__ = ["SshEngine"]
