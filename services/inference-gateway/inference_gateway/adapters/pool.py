"""An engram pool behind gRPC, as far as people look at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from inference_gateway.domain.pool_watch import TABLES_MAX, PoolFigures, PoolTable, PoolWatch
from treadle.client import Endpoint
from treadle.client.engram import AsyncEngramPool


class RpcPool:
    """Fits domain.pool_watch.Pool. Make it inside the loop that uses it; `await close()`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.address = endpoint.address
        self._pool = AsyncEngramPool(endpoint)

    async def figures(self, timeout_seconds: float) -> PoolFigures:
        """How it is now."""
        status = await self._pool.status(timeout_seconds)
        models = await self._pool.list_models()
        return PoolFigures(
            bytes=status.table_bytes,
            bytes_max=status.table_bytes_max,
            page_bytes=status.page_bytes,
            draining=status.draining,
            build_version=status.build_version,
            tables=tuple(
                PoolTable(item.model.name, item.version, item.current, item.segment_bytes, item.readers, item.warm_state.value)
                for item in models[:TABLES_MAX]
            ),
        )

    async def close(self) -> None:
        """Close the channel."""
        await self._pool.close()


@asynccontextmanager
async def followed_pools(endpoints: Sequence[Endpoint]) -> AsyncIterator[list[PoolWatch]]:
    """A watch over each pool, running while the body does."""
    pools = [RpcPool(endpoint) for endpoint in endpoints]
    watches = [PoolWatch(pool) for pool in pools]
    following = {asyncio.create_task(watch.run()) for watch in watches}
    try:
        yield watches
    finally:
        for task in following:
            task.cancel()
        if following:
            await asyncio.wait(following)
        for pool in pools:
            await pool.close()
