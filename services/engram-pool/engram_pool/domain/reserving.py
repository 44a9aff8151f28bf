"""A reserve of this host's memory bandwidth for other traffic, and what is left to rows."""

from __future__ import annotations

from engram_pool.domain.compute import Compute
from engram_pool.domain.tenancy import Bandwidth, Reserved


class Reserving:
    """Takes reserves. One may measure the memory, so it does not wait on the event loop."""

    def __init__(self, bandwidth: Bandwidth, compute: Compute) -> None:
        self._bandwidth, self._compute = bandwidth, compute

    async def reserve(self, name: str, bytes_per_second: int, seconds: float) -> Reserved:
        """Reserve, renew, or give back with 0. Raises InvalidArgument, ResourceExhausted, Unavailable."""
        return await self._compute.run(self._bandwidth.reserve, name, bytes_per_second, seconds)
