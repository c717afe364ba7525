"""What must be said of each plant: which ranks, what kind, and words that name the call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """``kind`` is that of the finding; ``ends`` for a plant that ends its ranks instead."""

    kind: str
    ranks: tuple[int, ...]
    words: tuple[str, ...]
    size: int = 2


EXPECTED = {
    "busy_loop": Expected("code", (1,), ("all_reduce #4 [32] float32", "in busy_loop")),
    "sleeping": Expected("code", (0,), ("all_reduce #4 [16] float32", "in sleeping")),
    "held_lock": Expected("code", (1,), ("broadcast #4 [4] float32", "in held_lock")),
    "hook_in_backward": Expected("code", (1,), ("all_reduce #", "hook_in_backward")),
    "skipped_call": Expected("code", (1,), ("barrier #4", "in skipped_call")),
    "data_loading": Expected("data", (1,), ("all_reduce #6 [2, 4]", "__getitem__")),
    "loader_worker": Expected("data", (0,), ("all_reduce #6 [2, 4]", "in loader_worker")),
    "reading_pipe": Expected("reading", (1,), ("all_reduce #4", "in reading_pipe")),
    "reading_socket": Expected("reading", (0,), ("all_reduce #4", "in reading_socket")),
    "checkpoint": Expected("saving", (0,), ("barrier #4", "in checkpoint")),
    "stopped": Expected("stopped", (1,), ("all_reduce #4 [8]", "kill -CONT")),
    "native_code": Expected("native", (1,), ("all_reduce #4 [64]", "in native_code")),
    "other_op": Expected("mismatch", (0, 1), ("rank 0 all_gather [4]", "rank 1 barrier")),
    "swapped_order": Expected("mismatch", (0, 1), ("rank 0 barrier", "rank 1 broadcast [16]")),
    "other_dtype": Expected("mismatch", (0, 1), ("[8] float32", "[8] int32")),
    "two_groups": Expected("deadlock", (0, 1), ("all_reduce #1", "group '1'", "group '2'")),
    "three_in_a_ring": Expected("deadlock", (0, 1, 2), ("'1'", "'2'", "'3'"), size=3),
    "both_receive": Expected("deadlock", (0, 1), ("recv from rank 1", "recv from rank 0")),
    "message_and_collective": Expected("deadlock", (0, 1), ("recv from rank 1", "all_reduce #4")),
    "no_sender": Expected("code", (1,), ("recv from rank 1", "in no_sender")),
    "subgroup_of_four": Expected("code", (3,), ("all_reduce #1", "ranks 2 and 3"), size=4),
    "left_early": Expected("ends", (1,), ("all_reduce #4 [128]", "rank 1 left the run")),
    "exited": Expected("ends", (1,), ("all_reduce #4 [256]", "rank 1 is gone")),
    "other_size": Expected("ends", (0,), ("Rank 0", "SIGABRT", "all_reduce #4 [8192]")),
}
