"""ZeRO and FSDP: parameters, gradients and optimizer state cut over the data-parallel ranks."""

from paceline.options import Sharding as Sharding
from paceline.parallel.shard.fsdp import Sharded as Sharded
from paceline.parallel.shard.fsdp import shard as shard
from paceline.parallel.shard.units import find_units as find_units
