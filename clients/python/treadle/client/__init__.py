"""The SDK of treadle: the only way anyone, its own services too, calls a service. Never imports torch."""

from treadle.client.endpoint import Endpoint
from treadle.client.fabric import AsyncFabric, Fabric

__all__ = ["AsyncFabric", "Endpoint", "Fabric"]
