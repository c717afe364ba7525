"""Horovod's interface on Paceline: ``import paceline.compat.horovod.torch as hvd``.

``paceline train --script old.py --backend horovod`` runs a script that imports ``horovod`` itself.
"""
