"""Preflight: what would go wrong with a run, found before it is launched.

Facts are gathered (``facts_*.py``, ``links.py``, ``probe.py``), brought together from all machines
(``rendezvous.py``, ``multi_node.py``), and checked by pure functions (``checks_*.py``).
"""
