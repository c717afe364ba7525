"""What is wrong with a run: hangs and stragglers while it goes, and the story of it afterwards.

Lies below the world, which starts the watch over its own rank (see ``docs/design.md``). The parts
that read reports and events (verdicts, stories) need no torch.
"""
