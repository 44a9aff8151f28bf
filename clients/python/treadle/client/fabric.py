"""The front door of the SDK: one object for the services of a fabric."""

from __future__ import annotations

from pathlib import Path

from treadle.client.asm import AsmStore, AsyncAsmStore
from treadle.client.endpoint import Endpoint
from treadle.client.engram import AsyncEngramPool, EngramPool
from treadle.client.gateway import AsyncGateway, Gateway
from treadle.client.worker import AsyncWorker, Worker

ENGRAM_ADDRESS = "127.0.0.1:7401"
WORKER_ADDRESS = "127.0.0.1:7404"
GATEWAY_ADDRESS = "127.0.0.1:7405"
ASM_ADDRESS = "127.0.0.1:7402"


class Fabric:
    """Services of a fabric, called from plain code; nothing connects before the first call.

    key, timeout_seconds, tls_*: see Endpoint; the same for all services
    """

    def __init__(
        self, engram: str = ENGRAM_ADDRESS, worker: str = WORKER_ADDRESS, *, key: str | None = None,
        tls_root_file: Path | None = None, timeout_seconds: float = 5.0, tls_cert_file: Path | None = None,
        tls_key_file: Path | None = None, gateway: str = GATEWAY_ADDRESS, asm: str = ASM_ADDRESS,
    ) -> None:  # fmt: skip
        self.engram = EngramPool(Endpoint(engram, key, tls_root_file, timeout_seconds, tls_cert_file, tls_key_file))
        self.worker = Worker(Endpoint(worker, key, tls_root_file, timeout_seconds, tls_cert_file, tls_key_file))
        self.asm = AsmStore(Endpoint(asm, key, tls_root_file, timeout_seconds, tls_cert_file, tls_key_file))
        self.gateway = Gateway(Endpoint(gateway, key, tls_root_file, timeout_seconds, tls_cert_file, tls_key_file))

    def close(self) -> None:
        """Close the channels. Handles and mapped dictionaries go on working."""
        self.engram.close()
        self.asm.close()
        self.worker.close()
        self.gateway.close()

    def __enter__(self) -> Fabric:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncFabric:
    """The same for asyncio; make it inside the loop that uses it."""

    def __init__(
        self, engram: str = ENGRAM_ADDRESS, worker: str = WORKER_ADDRESS, *, key: str | None = None,
        tls_root_file: Path | None = None, timeout_seconds: float = 5.0, tls_cert_file: Path | None = None,
        tls_key_file: Path | None = None, gateway: str = GATEWAY_ADDRESS, asm: str = ASM_ADDRESS,
    ) -> None:  # fmt: skip
        self.engram = AsyncEngramPool(Endpoint(engram, key, tls_root_file, timeout_seconds, tls_cert_file, tls_key_file))
        self.worker = AsyncWorker(Endpoint(worker, key, tls_root_file, timeout_seconds, tls_cert_file, tls_key_file))
        self.asm = AsyncAsmStore(Endpoint(asm, key, tls_root_file, timeout_seconds, tls_cert_file, tls_key_file))
        self.gateway = AsyncGateway(Endpoint(gateway, key, tls_root_file, timeout_seconds, tls_cert_file, tls_key_file))

    async def close(self) -> None:
        """Close the channels. Handles and mapped dictionaries go on working."""
        await self.engram.close()
        await self.asm.close()
        await self.worker.close()
        await self.gateway.close()

    async def __aenter__(self) -> AsyncFabric:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
