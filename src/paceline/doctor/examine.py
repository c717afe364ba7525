"""Gathering all facts: of this machine alone, or together with the doctors of the others."""

from __future__ import annotations

import contextlib
import os
import secrets

from paceline.doctor.facts import ClusterFacts
from paceline.doctor.facts_config import gather_config
from paceline.doctor.facts_folders import Tokens
from paceline.doctor.own_machine import DoctorRequest, OwnMachine, examine_alone


def examine(request: DoctorRequest) -> ClusterFacts:
    """All facts about the machines that the config of ``request`` names."""
    asked = gather_config(request.source, request.overrides, request.flags)
    with contextlib.ExitStack() as stack:
        own = OwnMachine(asked, stack)
        if asked.plan.most_nodes > 1 and asked.rdzv:
            # torch would warn of addresses without a name: whether names resolve is in the table.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            from paceline.doctor.multi_node import examine_together

            return examine_together(own, request)
        tokens = Tokens(asked.folders, secrets.token_hex(4))
        stack.callback(tokens.remove_folders)
        stack.callback(tokens.clean_up)
        return examine_alone(own, tokens)
