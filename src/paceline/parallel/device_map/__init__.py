"""A model over several devices of one process: ``device_map="auto"``, or a map by hand."""

from paceline.parallel.device_map.placement import DeviceLike as DeviceLike
from paceline.parallel.device_map.placement import DeviceMap as DeviceMap
from paceline.parallel.device_map.placement import place as place
