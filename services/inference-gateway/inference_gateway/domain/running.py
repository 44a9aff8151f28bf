"""Requests in progress by the name that their caller gave them, so that the caller can end them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from inference_gateway.domain.errors import RequestCancelled, RequestNotFound
from inference_gateway.domain.lifetime import Lifetime

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "embd-")  # the id of an answer is the request's behind one of these


class Running:
    """One entry for each request that is let in, so admission bounds it. All on the event loop."""

    def __init__(self) -> None:
        self._alive: dict[tuple[str, str], set[Lifetime]] = {}

    @contextmanager
    def entered(self, tenant: str, request_id: str, lifetime: Lifetime) -> Iterator[None]:
        """While the body runs, `cancel` ends `lifetime` with RequestCancelled."""
        key = (tenant, request_id)
        self._alive.setdefault(key, set()).add(lifetime)
        try:
            yield
        finally:
            self._alive[key].discard(lifetime)
            if not self._alive[key]:
                del self._alive[key]

    def cancel(self, tenant: str, request_id: str) -> None:
        """End the requests of that name. Raises RequestNotFound where this tenant has none in progress, whoever else may."""
        plain = next((request_id.removeprefix(start) for start in _ANSWER_PREFIXES if request_id.startswith(start)), request_id)
        alive = [*self._alive.get((tenant, request_id), ()), *(self._alive.get((tenant, plain), ()) if plain != request_id else ())]
        if not alive:
            raise RequestNotFound(f"no request {request_id[:128]!r} is in progress here")
        for lifetime in alive:
            lifetime.end(RequestCancelled("the request was cancelled by its caller"))
