"""What a model asks for: the two inequalities of the CXL paper (arXiv 2603.10087, section 3.2).

    (1) bandwidth   B_pool > T x S_layer x N_eng
    (2) latency     L_pool(N_token, S_layer) < sum of t_exec(i) for i = 1 .. k-1

T tokens a second, S_layer bytes of a token and layer, N_eng Engram layers, N_token tokens of a step, t_exec(i) the time of decoder
layer i, k the Engram layer counted from 1. As in the paper's case study, every decoder layer takes its share of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.cli.plan.models import PlannedLayer, PlannedModel, Reading
from treadle.contract import InvalidArgument

HOSTS_MAX = 4096
BATCH_MAX = 1 << 20  # tokens of a step


@dataclass(frozen=True, slots=True)
class Workload:
    """What runs.

    hosts:           inference hosts
    batch:           N_token, tokens of one step on one host
    step_seconds:    of one step
    tokens_second:   T, all hosts together; None: what batch and step give
    """

    hosts: int = 1
    batch: int = 256
    step_seconds: float = 0.0036
    tokens_second: float | None = None

    def __post_init__(self) -> None:
        if not (1 <= self.hosts <= HOSTS_MAX and 1 <= self.batch <= BATCH_MAX):
            raise InvalidArgument(f"1 to {HOSTS_MAX} hosts with a batch of 1 to {BATCH_MAX} tokens, got {self.hosts}, {self.batch}")
        for name, value in (("step", self.step_seconds), ("throughput", self.tokens_second)):
            if value is not None and not 0 < value < math.inf:
                raise InvalidArgument(f"{name}: above 0 and finite, got {value}")

    @property
    def throughput(self) -> float:
        """T, tokens a second of all hosts."""
        return self.hosts * self.batch / self.step_seconds if self.tokens_second is None else self.tokens_second


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """What one Engram layer asks for in one step on one host.

    payload_bytes:  of its rows: N_token x S_layer
    window_seconds: (2), right-hand side: from the start of the step until the layer begins
    bytes_second:   at which the payload just fits the window; None where there is no window
    """

    layer: PlannedLayer
    payload_bytes: int
    window_seconds: float
    bytes_second: float | None


@dataclass(frozen=True, slots=True)
class Demand:
    """What a reading of a model asks for. `average_bytes_second`: (1), right-hand side, all hosts together."""

    reading: Reading
    average_bytes_second: float
    layers: tuple[LayerDemand, ...]


def demands(model: PlannedModel, workload: Workload) -> tuple[Demand, ...]:
    """One for each reading of the model."""
    return tuple(_demand(model, reading, workload) for reading in model.readings)


def _demand(model: PlannedModel, reading: Reading, workload: Workload) -> Demand:
    average = workload.throughput * sum(layer.token_bytes for layer in reading.layers)
    share = workload.step_seconds / model.decoder_layers
    return Demand(reading, average, tuple(_layer(layer, workload.batch, share) for layer in reading.layers))


def _layer(layer: PlannedLayer, batch: int, layer_seconds: float) -> LayerDemand:
    window, payload = layer.index * layer_seconds, batch * layer.token_bytes  # index = k - 1 layers run before it
    return LayerDemand(layer, payload, window, payload / window if window else None)
