"""Python processes that start warm: forked from one that has imported torch, not loaded from disk.

Most of what the suite costs would be some thousand imports of torch: by launchers, by each of their
ranks, by scripts. While ``installed``, ``subprocess.Popen`` starts commands of this Python
(``python -m …``, ``-c …`` or a script) as forks of a server instead. To whoever started it, such a
process is what a cold one is: a child with pipes, session, folder, environment, arguments and
namespaces as asked for, in ``/proc`` as well. It has a server of its own for what it starts in
turn, so that the ranks of a launcher are warm, too.

What a program sets in its environment before it imports torch comes too late in a warm start: set
``OMP_NUM_THREADS`` for it from outside. Commands with other options of Python, and tests marked ``cold``, start as ever: the latter is for
those that look at the start itself.
"""

from warm.popen import cold, installed

__all__ = ["cold", "installed"]
