"""What a run tells when it does not go as it should: hangs, stragglers, and the story of a run.

Lies below the world, which starts the watch over its own rank (see ``docs/design.md``). The parts
that read reports and events (verdicts, stories) need no torch.
"""
