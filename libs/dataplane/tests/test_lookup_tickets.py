"""Lookups by ticket give the bytes of `treadle.kernels.lookup`, however they are cut, and refuse what it refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import Deadline, InvalidArgument, RowLayout, Windows
from treadle.contract.families import deepseek_v41_model, demo_model, qwen_ple_model
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue, Ticket
from treadle.dataplane.slicing import slice_windows
from treadle.kernels import HashPlan, lookup, row_ids

SECONDS = 20.0
UNTOUCHED = 0xA5
VOCABULARY = 3000
LATER = Deadline(1_000)

MakeQueue = Callable[..., DeadlineQueue]


@pytest.fixture(params=["native", "python"])
def make_queue(request: pytest.FixtureRequest) -> Iterator[MakeQueue]:
    if request.param == "native" and IMPLEMENTATION != "native":
        pytest.skip("the native extension was not built")
    made: list[DeadlineQueue] = []

    def make(**options: Any) -> DeadlineQueue:
        made.append(DeadlineQueue(implementation=request.param, **options))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@dataclass(frozen=True)
class Layer:
    """One Engram layer with its table; makes windows that fit it."""

    plan: HashPlan
    table: NDArray[np.uint8]

    def windows(self, random: np.random.Generator, tokens: int, requests: int, *, dead: bool) -> Windows:
        depth = self.plan.order_max - 1
        starts = np.zeros(requests + 1, np.int32)
        starts[1:-1] = np.sort(random.integers(0, tokens + 1, requests - 1))
        starts[-1] = tokens
        ids = random.integers(0, VOCABULARY, tokens)
        if self.plan.eos >= 0:
            ids[random.random(tokens) < 0.1] = self.plan.eos
        return Windows(
            tokens=ids, starts=starts, lookback=random.integers(-1, VOCABULARY, (requests, depth)),
            dead=random.random(tokens) < 0.2 if dead else None,
            lookback_dead=random.random((requests, depth)) < 0.2 if dead else None,
        )  # fmt: skip

    def fresh_out(self, windows: Windows) -> NDArray[np.uint8]:
        return np.full((windows.token_count, self.plan.columns, self.table.shape[1]), UNTOUCHED, np.uint8)

    def expected(self, windows: Windows) -> NDArray[np.uint8]:
        out = self.fresh_out(windows)
        lookup(self.plan, self.table, windows, out)
        return out

    def submit(self, queue: DeadlineQueue, windows: Windows, deadline: Deadline = LATER) -> tuple[Ticket, NDArray[np.uint8]]:
        out = self.fresh_out(windows)
        return queue.submit_lookup(self.plan, self.table, windows, out, deadline), out


@pytest.fixture(scope="module")
def layers() -> dict[str, Layer]:
    random = np.random.default_rng(7)
    token_map = random.integers(0, 2000, VOCABULARY).astype(np.int32)
    digest = hashlib.sha256(token_map.tobytes()).hexdigest()
    models = [
        demo_model("demo", layers=[2], token_map=digest, compressed_vocab_size=2000, pad_id=2, prime_base=500, row=RowLayout(320, 160, "bf16")),
        deepseek_v41_model("v4.1", token_map=digest, pad_id=2, compressed_vocab_size=2000, layers=(1,), prime_base=400),
        qwen_ple_model("qwen", eos_id=VOCABULARY - 1, vocabulary=VOCABULARY, prime_base=300, row=RowLayout(160, 160, "fp8_e4m3")),
    ]  # fmt: skip
    built = {}
    for model in models:
        plan = HashPlan.from_model(model, model.layers[0], None if model.token_map is None else token_map)
        table = random.integers(0, 256, (plan.rows_hashed, model.row.bytes), dtype=np.uint8)
        table.setflags(write=False)
        built[model.name] = Layer(plan, table)
    return built


FAMILIES = pytest.mark.parametrize("family", ["demo", "v4.1", "qwen"])


@FAMILIES
@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("piece_rows", [1, 50, 1024])
def test_a_lookup_cut_into_pieces_is_the_whole_lookup(
    make_queue: MakeQueue, layers: dict[str, Layer], family: str, dead: bool, piece_rows: int
) -> None:
    layer, random = layers[family], np.random.default_rng(piece_rows)
    queue = make_queue(piece_rows=piece_rows)
    for requests in (1, 2, 9):
        windows = layer.windows(random, 60, requests, dead=dead)
        ticket, out = layer.submit(queue, windows)
        assert ticket.wait(SECONDS)
        assert np.array_equal(out, layer.expected(windows))


def test_ten_thousand_tickets_from_several_threads_give_the_bytes_of_the_kernel(
    make_queue: MakeQueue, layers: dict[str, Layer]
) -> None:
    random = np.random.default_rng(11)
    chosen = [layers[name] for name in ("demo", "v4.1", "qwen") for _ in range(40)]
    cases = [
        (layer, layer.windows(random, int(random.integers(0, 24)), int(random.integers(1, 4)), dead=i % 2 == 0))
        for i, layer in enumerate(chosen)
    ]
    expected = [layer.expected(windows) for layer, windows in cases]
    queue = make_queue(workers=2, piece_rows=100, tickets_max=64)

    def submit_and_compare(seed: int) -> int:
        random, wrong = np.random.default_rng(seed), 0
        for _ in range(250):
            numbers = random.integers(0, len(cases), 10)  # few enough that all threads together stay below tickets_max
            tickets = [(n, *cases[n][0].submit(queue, cases[n][1], Deadline(int(random.integers(0, 1000))))) for n in numbers]
            wrong += sum(not (ticket.wait(SECONDS) and np.array_equal(out, expected[n])) for n, ticket, out in tickets)
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(submit_and_compare, range(4))) == [0, 0, 0, 0]
    assert queue.stats()["tickets_total"] == 10_000


def test_a_cancelled_lookup_has_whole_tokens(make_queue: MakeQueue, layers: dict[str, Layer]) -> None:
    layer = layers["demo"]
    windows = layer.windows(np.random.default_rng(5), 4000, 3, dead=False)
    expected = layer.expected(windows)
    queue = make_queue(piece_rows=32)
    for _ in range(200):
        ticket, out = layer.submit(queue, windows)
        while ticket.started_ns == 0:
            ticket.wait(0)
        there = ticket.cancel().reshape(out.shape[:2])
        if not there.all():
            break
    else:
        raise AssertionError("never cancelled midway")
    assert (there.all(axis=1) == there.any(axis=1)).all()
    assert (out[there] == expected[there]).all()
    assert (out[~there] == UNTOUCHED).all()


def test_a_lookup_of_no_tokens_is_done_at_once(make_queue: MakeQueue, layers: dict[str, Layer]) -> None:
    layer = layers["qwen"]
    ticket, _ = layer.submit(make_queue(), Windows.of_sequences([], layer.plan.order_max - 1))
    assert ticket.wait(0)


def test_a_lookup_that_cannot_be_done_is_refused_before_it_is_queued(make_queue: MakeQueue, layers: dict[str, Layer]) -> None:
    layer, queue = layers["demo"], make_queue()
    windows = layer.windows(np.random.default_rng(1), 6, 2, dead=False)
    out = layer.fresh_out(windows)
    unknown = windows.tokens.copy()
    unknown[4] = VOCABULARY
    wrong: list[tuple[NDArray[np.uint8], Windows, NDArray[np.uint8]]] = [
        (layer.table[:-1], windows, out), (layer.table[:, ::2], windows, out), (layer.table, windows, out[:5]), (layer.table, windows, out[:, :, ::-1]),
        (layer.table, replace(windows, tokens=unknown), out), (layer.table, replace(windows, lookback=windows.lookback[:, :1].copy()), out),
    ]  # fmt: skip
    for table, bad, target in wrong:
        with pytest.raises(InvalidArgument) as refused:
            queue.submit_lookup(layer.plan, table, bad, target, LATER)
        with pytest.raises(InvalidArgument) as refused_by_kernel:
            lookup(layer.plan, table, bad, target)
        assert str(refused.value) == str(refused_by_kernel.value)
    assert (out == UNTOUCHED).all()
    assert queue.stats()["tickets_total"] == 0


@FAMILIES
@pytest.mark.parametrize("dead", [False, True])
def test_sliced_windows_hash_like_the_whole(layers: dict[str, Layer], family: str, dead: bool) -> None:
    layer, random = layers[family], np.random.default_rng(3)
    for requests in (1, 3, 12):
        windows = layer.windows(random, 17, requests, dead=dead)
        whole = row_ids(layer.plan, windows)
        for first in range(17):
            for last in range(first + 1, 18):
                assert np.array_equal(row_ids(layer.plan, slice_windows(windows, first, last)), whole[first:last])
