"""The gateway's figures in Prometheus."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from inference_gateway.domain.generation import Usage
from inference_gateway.domain.memories import ChosenBy

MEMORIES_NAMED = 64  # as labels of one metric
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TENANTS_MAX = 200  # names as labels; a key file may name many, and change
OTHER_TENANTS = "(others)"  # no name that a file can give
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class PrometheusFigures:
    """Fits domain.ports.Figures. One for each registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "treadle_gateway_requests", "HTTP requests, by route and outcome", ["route", "outcome"], registry=registry
        )
        self._request_seconds = Histogram(
            "treadle_gateway_request_seconds", "From a request to the end of its answer", ["route"],
            registry=registry, buckets=_REQUEST_BUCKETS,
        )  # fmt: skip
        self._in_flight = Gauge("treadle_gateway_requests_in_flight", "HTTP requests not yet answered", registry=registry)
        self._first_token_seconds = Histogram(
            "treadle_gateway_time_to_first_token_seconds", "From a request to its first token",
            registry=registry, buckets=_REQUEST_BUCKETS,
        )  # fmt: skip
        self._inter_token_seconds = Histogram(
            "treadle_gateway_inter_token_seconds", "Between one token and the next", registry=registry, buckets=_TOKEN_BUCKETS
        )
        self._tokens = Counter("treadle_gateway_tokens", "Tokens of generations, by kind", ["kind"], registry=registry)
        self._ignored = Counter(
            "treadle_gateway_ignored_fields", "Fields of requests that mean nothing here", ["field"], registry=registry
        )
        self._choices = Counter(
            "treadle_gateway_memory_choices", "Requests by who chose their memory and whether there is one", ["by", "memory"],
            registry=registry,
        )  # fmt: skip
        self._tenants: set[str] = {""}
        self._limited = Counter(
            "treadle_gateway_limited", "Requests that a limit of their key refused, by limit and configured tenant",
            ["limit", "tenant"], registry=registry,
        )  # fmt: skip
        self._key_files = Counter(
            "treadle_gateway_key_file_changes", "Changes of the key file, by what came of it", ["outcome"], registry=registry
        )
        self._tenant_tokens = Counter(
            "treadle_gateway_tenant_tokens", "Tokens charged to configured tenants, by kind", ["tenant", "kind"], registry=registry
        )
        self._hints = Counter(
            "treadle_gateway_hints", "Prompts told to a pool before their lookups, by outcome", ["outcome"], registry=registry
        )
        self._degraded = Counter(
            "treadle_gateway_degraded",
            "Answers made with memory missing, by which and why",
            ["memory", "because"],
            registry=registry,
        )
        self._missed: set[str] = set()
        self._left = Counter(
            "treadle_gateway_client_disconnects", "Clients that left before their answer was complete", registry=registry
        )
        self._unread = Counter(
            "treadle_gateway_unread_connections", "Connections ended because their client did not read", registry=registry
        )
        self._routed = Counter(
            "treadle_gateway_routed", "Requests given a worker, by why it was this one", ["by"], registry=registry
        )
        self._routed_tokens = Counter(
            "treadle_gateway_routed_prompt_tokens",
            "Tokens of prompts that lay in the prefix cache of the worker that was chosen (cached), and of the best (possible)",
            ["kind"], registry=registry,
        )  # fmt: skip

    def request_began(self, route: str) -> None:
        """One more in flight; `route` is counted when it ends."""
        self._in_flight.inc()

    def request_ended(self, route: str, outcome: str, seconds: float) -> None:
        """One less in flight."""
        self._in_flight.dec()
        self._requests.labels(route, outcome).inc()
        self._request_seconds.labels(route).observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Observe the time to a first token."""
        self._first_token_seconds.observe(seconds)

    def tokens_came(self, count: int, seconds: float) -> None:
        """Observe one gap for each of `count` tokens that came together."""
        for _ in range(count):
            self._inter_token_seconds.observe(seconds / count)

    def tokens_used(self, usage: Usage) -> None:
        """Add the tokens of one generation."""
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("completion").inc(usage.completion_tokens)

    def field_ignored(self, field: str) -> None:
        """Count a field; the caller keeps the names few."""
        self._ignored.labels(field).inc()

    def memory_chosen(self, by: ChosenBy, used: bool) -> None:
        """Count a request whose memory is settled."""
        self._choices.labels(by.value, "some" if used else "none").inc()

    def hint_ended(self, outcome: str) -> None:
        """Count a prompt that was told to a pool, or was not."""
        self._hints.labels(outcome).inc()

    def answer_degraded(self, memory: str, because: str) -> None:
        """Count a degraded answer; beyond MEMORIES_NAMED names as `other`."""
        if len(self._missed) < MEMORIES_NAMED:
            self._missed.add(memory)
        self._degraded.labels(memory if memory in self._missed else "other", because or "unknown").inc()

    def request_limited(self, limit: str, tenant: str) -> None:
        """Count a request that a limit of its key refused."""
        self._limited.labels(limit, self._tenant(tenant)).inc()

    def keys_changed(self, outcome: str) -> None:
        """Count a change of the key file."""
        self._key_files.labels(outcome).inc()

    def tenant_tokens(self, tenant: str, kind: str, count: int) -> None:
        """Add tokens of one tenant; callers without a configured name count nowhere."""
        if tenant:
            self._tenant_tokens.labels(self._tenant(tenant), kind).inc(count)

    def _tenant(self, name: str) -> str:
        if name in self._tenants or len(self._tenants) < TENANTS_MAX:
            self._tenants.add(name)
            return name
        return OTHER_TENANTS

    def client_left(self) -> None:
        """Count a client that left."""
        self._left.inc()

    def client_unread(self) -> None:
        """Count a client that did not read."""
        self._unread.inc()

    def routed(self, by: str, cached_tokens: int, possible_tokens: int) -> None:
        """Count a request's first choice of a worker."""
        self._routed.labels(by).inc()
        self._routed_tokens.labels("cached").inc(cached_tokens)
        self._routed_tokens.labels("possible").inc(possible_tokens)

    def exposition(self) -> tuple[bytes, str]:
        """All figures of the registry as text."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
