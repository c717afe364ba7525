"""Helpers of Horovod's runner that scripts and tests import."""
