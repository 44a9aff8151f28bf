"""What admission and tenants say at the native doors reaches the caller: predicted finish, retry, and whose token it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import AccessDenied, Deadline, DeadlineExceeded, EngramModel, ResourceExhausted, RowLayout
from treadle.contract.families import qwen_ple_model
from treadle.dataplane import (
    IMPLEMENTATION,
    DeadlineQueue,
    RemoteLayer,
    RemoteRows,
    ServedLayer,
    SocketServer,
    TenantLimits,
    Tenants,
    Versions,
)
from treadle.dataplane.ring import RingClient, RingServer
from treadle.kernels import HashPlan

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")

ROWS, ROW_BYTES, LAYER, VERSION, SECONDS = 20_000, 64, 3, "ab" * 32, 10.0
TOKENS = {"key": 0, "of slow": 1, "of free": 2}
IDS = np.arange(4000, dtype=np.int64)

Ask = Callable[[Deadline, str], None]


@pytest.fixture
def queue() -> Iterator[DeadlineQueue]:
    digests = {hashlib.sha256(token.encode()).digest(): index for token, index in TOKENS.items()}
    tenants = Tenants((TenantLimits("slow", rows_per_second_max=100), TenantLimits("free")), digests)
    with DeadlineQueue(admission=True, tenants=tenants, implementation="native") as queue:
        yield queue


def model_and_versions(table: NDArray[np.uint8]) -> tuple[EngramModel, Versions]:
    model, versions = qwen_ple_model("ple", prime_base=ROWS // 32, row=RowLayout(ROW_BYTES, ROW_BYTES // 2, "bf16")), Versions()
    plan = HashPlan.from_model(model, model.layers[0], None)
    versions.publish(VERSION, bytes(32), [ServedLayer(LAYER, plan, table)])
    return model, versions


@pytest.fixture(params=["socket", "ring"])
def ask(request: pytest.FixtureRequest, queue: DeadlineQueue, tmp_path: Path) -> Iterator[Ask]:
    """`ask(deadline, token)`: gather through a door; raises what it is refused with, and compares the rows otherwise."""
    table = np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)
    model, versions = model_and_versions(table)
    path = str(tmp_path / "door")
    with ExitStack() as stack:
        if request.param == "socket":
            stack.enter_context(SocketServer(queue, versions, [f"unix:{path}"]))
        else:
            stack.callback(RingServer(path, queue, versions, clients_max=4, arena_bytes_max=4 << 20).close)

        def by_socket(deadline: Deadline, token: str) -> None:
            out = np.zeros((IDS.size, ROW_BYTES), np.uint8)
            plan = HashPlan.from_model(model, model.layers[0], None)
            rows = RemoteRows(VERSION, bytes(32), [RemoteLayer(LAYER, ROWS, ROW_BYTES, plan.columns)], token=token)
            stack.callback(rows.close)
            rows.add_owner(f"unix:{path}")
            assert rows.submit_gather(LAYER, IDS, out, deadline, Deadline.after(SECONDS)).wait(SECONDS)
            assert (out == table[IDS]).all()

        def by_ring(deadline: Deadline, token: str) -> None:
            out = np.zeros((IDS.size, ROW_BYTES), np.uint8)
            with RingClient(path, token=hashlib.sha256(token.encode()).digest()) as client:
                assert client.submit_gather(bytes.fromhex(VERSION), LAYER, IDS, out, deadline).wait(SECONDS)
            assert (out == table[IDS]).all()

        yield by_socket if request.param == "socket" else by_ring


def test_who_is_refused_for_want_of_time_hears_when_it_would_be_done(ask: Ask, queue: DeadlineQueue) -> None:
    ask(Deadline.after(SECONDS), "of free")
    with pytest.raises(DeadlineExceeded) as refused:
        ask(Deadline.after(1e-6), "of free")
    assert refused.value.predicted_finish_seconds is not None
    assert 0 < refused.value.predicted_finish_seconds < SECONDS
    assert queue.tenants.figures(TOKENS["of free"]).refused["late"] >= 1


def test_a_quota_is_taken_off_whose_token_comes(ask: Ask, queue: DeadlineQueue) -> None:
    ask(Deadline.after(SECONDS), "of slow")
    with pytest.raises(ResourceExhausted, match="quota") as refused:
        ask(Deadline.after(SECONDS), "of slow")
    assert refused.value.retry_after_seconds == pytest.approx(39.75, abs=20)
    ask(Deadline.after(SECONDS), "key")
    served = [queue.tenants.figures(tenant).rows["memory"] for tenant in range(3)]
    assert served == [IDS.size, IDS.size, 0]


def test_a_strangers_token_is_refused(ask: Ask) -> None:
    with pytest.raises(AccessDenied):
        ask(Deadline.after(SECONDS), "a stranger's")
