"""Preflight: what would go wrong with a run, found before it is launched.

Facts are gathered (``facts_*.py``, ``links.py``, ``probe.py``), brought together from all machines
(``meeting.py``, ``examine.py``), and judged by pure functions (``judge_*.py``).
"""
