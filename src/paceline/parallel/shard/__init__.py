"""ZeRO and FSDP: parameters, gradients and optimizer state cut over the data-parallel ranks.

``fsdp.py`` does it with torch's FSDP2; ``units.py`` says which modules are gathered together. The
other files are what FSDP2 lacks: parameters without dimensions, parameters that a step does not
use, calls from outside the step, inputs in low precision, and lean collectives on Gloo.
"""

from paceline.options import Sharding as Sharding
from paceline.parallel.shard.fsdp import Sharded as Sharded
from paceline.parallel.shard.fsdp import shard as shard
from paceline.parallel.shard.units import find_units as find_units
