"""Hangs, named: a watch over each rank, and a verdict over what all of them tell."""
