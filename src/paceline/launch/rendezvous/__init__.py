"""How the launchers of several machines find each other and form a world together.

``handler`` is what the agent needs of a rendezvous, and the one of a single machine; ``multi_node``
the one of several. ``joining`` is a launcher's way into the next world, ``membership`` what the
launchers agree on when it forms, ``heartbeats`` how they notice that one of them is gone.
"""
