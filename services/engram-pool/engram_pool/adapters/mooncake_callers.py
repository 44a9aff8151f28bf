"""Who asks at the mooncake door: found by the proof of a key, held to the tenant's quotas and to the host's bandwidth reserve."""

from __future__ import annotations

import hmac
import time

from engram_pool.domain.tenancy import Bandwidth
from treadle.client.engram import mooncake_wire as wire
from treadle.contract import AccessDenied, Deadline
from treadle.dataplane import NOBODY, Tenants


class Callers:
    """The pool's callers, as its other doors know them. Any thread."""

    def __init__(self, tenants: Tenants, bandwidth: Bandwidth) -> None:
        self._tenants, self._bandwidth = tenants, bandwidth

    def find(self, proof: str, nonce: bytes) -> int:
        """Index of the tenant whose key the proof shows. Raises AccessDenied for nobody's, where keys are asked for."""
        if not self._tenants.tokens:
            return NOBODY
        found = -1
        for digest, tenant in self._tenants.tokens.items():  # all of them: how long it takes says nothing of the keys
            if hmac.compare_digest(wire.proof(digest, nonce).encode(), proof.encode()):
                found = tenant
        if found < 0:
            raise AccessDenied("the mooncake door needs a key that the pool knows")
        return found

    def admit(self, tenant: int, rows: int, row_bytes: int, deadline: Deadline) -> None:
        """Take a request off its quotas, and wait for its part of the bandwidth where some is reserved.

        Raises ResourceExhausted, saying when to try again, DeadlineExceeded.
        """
        self._tenants.take(tenant, rows, row_bytes)
        wait_seconds = self._bandwidth.pace_seconds(rows * row_bytes)
        if wait_seconds > 0:
            time.sleep(min(wait_seconds, deadline.remaining_seconds()))
            deadline.check(before="gathering, paced to a bandwidth reserve")

    def served(self, tenant: int, rows: int, row_bytes: int, deadline: Deadline) -> None:
        """Count rows that wait for the client."""
        self._tenants.served(tenant, rows, row_bytes, deadline.slack_of(time.monotonic_ns()))
