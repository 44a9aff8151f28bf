"""Rows of an Engram table from this host's one copy straight to a GPU. Not run on a GPU so far; built and tested without one.

Owns registered host memory and gathers on a side stream. Does not own tables (a handle does), decide when a layer starts, or dequantise.
"""

from treadle.cuda.device_rows import DeviceLayerRows, DeviceRows
from treadle.cuda.library import device_count

__all__ = ["DeviceLayerRows", "DeviceRows", "device_count"]
