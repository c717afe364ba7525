"""Where checkpoints lie: a local folder or anything fsspec knows; and the lock on it."""
