"""The copy of a run's state in shared memory, on this node and a partner's."""
