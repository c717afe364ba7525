"""Turning a config or a script into processes, and reading the environment they are started in.

``local`` starts ranks on this machine, ``run_folder`` makes and finds run folders, ``environment``
reads what a launcher (this one, or torchrun) tells its ranks.
"""
