"""Rows: every size, what is refused before a byte is read, the fused lookup, and who may run meanwhile."""

import hashlib
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, RowLayout, RowOutOfRange, Scale, Windows
from treadle.contract.families import deepseek_v41_model, demo_model, qwen_ple_model
from treadle.kernels import HashPlan

SIZES = [
    16,
    17,
    31,
    63,
    64,
    65,
    84,
    127,
    128,
    129,
    160,
    255,
    256,
    257,
    263,
    264,
    265,
    319,
    320,
    321,
    511,
    640,
    1023,
    1024,
    2560,
    4095,
    4096,
]
TABLE = np.random.default_rng(0).integers(0, 256, (50, 64), dtype=np.uint8)
FILLED = 0xA5


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(f"treadle.kernels.{request.param}", reason="the extension was not built", exc_type=ImportError)


def gathered(kernels: ModuleType, table: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    out = np.full((*rows.shape, table.shape[1]), FILLED, dtype=np.uint8)
    kernels.gather_rows(table, rows, out)
    return out


@pytest.mark.parametrize("row_bytes", SIZES)
def test_rows_of_any_size_arrive_whole_and_nothing_beside_them_is_written(kernels: ModuleType, row_bytes: int) -> None:
    rng = np.random.default_rng(row_bytes)
    table = rng.integers(0, 256, (97, row_bytes), dtype=np.uint8)
    for count in (0, 1, 2, 15, 16, 17, 200):  # around the prefetch distance
        rows = rng.integers(0, 97, count)
        rows[:2] = [0, 96][:count]
        around = np.full((count + 2, row_bytes), FILLED, dtype=np.uint8)
        kernels.gather_rows(table, rows, around[1:-1])
        assert (around[1:-1] == table[rows]).all()
        assert (around[[0, -1]] == FILLED).all()


def test_every_row_size_between_the_limits_works(kernels: ModuleType) -> None:
    data = np.random.default_rng(1).integers(0, 256, 5 * 4096, dtype=np.uint8)
    rows = np.array([4, 0, 3, 3], dtype=np.int64)
    for row_bytes in range(16, 4097, 3):
        table = data[: 5 * row_bytes].reshape(5, row_bytes)
        assert (gathered(kernels, table, rows) == table[rows]).all()


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5), (2, 3, 4), (0, 8)])
def test_ids_of_any_shape_give_rows_of_that_shape(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(2).integers(0, 50, shape)
    assert (gathered(kernels, TABLE, rows) == TABLE[rows]).all()


@pytest.mark.parametrize("bad", [-1, 50, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("at", [0, 1, 4_095, 4_096, 9_999])
def test_a_bad_id_is_named_and_nothing_is_written(kernels: ModuleType, bad: int, at: int) -> None:
    rows = np.random.default_rng(3).integers(0, 50, (1_250, 8))
    rows.reshape(-1)[at] = bad
    rows.reshape(-1)[at + 1 :: 97] = -7  # later ones are not the first
    out = np.full((1_250, 8, 64), FILLED, dtype=np.uint8)
    with pytest.raises(RowOutOfRange, match=rf"id {bad} at {at} .* 50 rows"):
        kernels.gather_rows(TABLE, rows, out)
    assert (out == FILLED).all()


def test_no_id_fits_an_empty_table(kernels: ModuleType) -> None:
    empty = np.zeros((0, 64), dtype=np.uint8)
    assert gathered(kernels, empty, np.zeros(0, dtype=np.int64)).size == 0
    with pytest.raises(RowOutOfRange):
        gathered(kernels, empty, np.zeros(1, dtype=np.int64))


def test_both_names_of_a_64_bit_type_are_the_same_to_us(kernels: ModuleType) -> None:
    rows = np.array([3, 1, 2], dtype=np.longlong)
    assert (gathered(kernels, TABLE, rows) == TABLE[[3, 1, 2]]).all()


ROWS, OUT = np.zeros(3, dtype=np.int64), np.zeros((3, 64), dtype=np.uint8)
MISALIGNED = np.frombuffer(bytes(25), dtype=np.uint8)[1:].view(np.int64)


@pytest.mark.parametrize(
    ("table", "rows", "out", "name"),
    [
        (TABLE.astype(np.int8), ROWS, OUT, "table"),
        (TABLE[:, :8].copy(), ROWS, np.zeros((3, 8), dtype=np.uint8), "table"),
        (np.zeros((4, 4097), dtype=np.uint8), ROWS, np.zeros((3, 4097), dtype=np.uint8), "table"),
        (TABLE[:, ::2], ROWS, np.zeros((3, 32), dtype=np.uint8), "table"),
        (TABLE[::2], ROWS, OUT, "table"),
        (TABLE.reshape(-1), ROWS, OUT, "table"),
        (TABLE.tolist(), ROWS, OUT, "table"),
        (TABLE, ROWS.astype(np.int32), OUT, "rows"),
        (TABLE, ROWS.astype(">i8"), OUT, "rows"),
        (TABLE, np.zeros(6, dtype=np.int64)[::2], OUT, "rows"),
        (TABLE, MISALIGNED, OUT, "rows"),
        (TABLE, [0, 0, 0], OUT, "rows"),
        (TABLE, ROWS, OUT[:2], "out"),
        (TABLE, ROWS, OUT.reshape(-1), "out"),
        (TABLE, ROWS, OUT.astype(np.int8), "out"),
        (TABLE, ROWS, np.zeros((3, 128), dtype=np.uint8)[:, ::2], "out"),
        (TABLE, ROWS, np.frombuffer(bytes(192), dtype=np.uint8).reshape(3, 64), "out"),
    ],
)
def test_arrays_of_the_wrong_shape_dtype_or_layout_are_refused(
    kernels: ModuleType, table: Any, rows: Any, out: Any, name: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: "):
        kernels.gather_rows(table, rows, out)


def small_plan(family: str) -> HashPlan:
    token_map = np.random.default_rng(4).integers(0, 800, 1_000).astype(np.int32)
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    if family == "demo":
        model = demo_model(family, layers=(2,), token_map=digest, compressed_vocab_size=800, pad_id=1, prime_base=50,
                           row=RowLayout(320, 160, "bf16"))  # fmt: skip
        return HashPlan.from_model(model, 2, token_map)
    if family == "v41":
        model = deepseek_v41_model(family, token_map=digest, pad_id=1, compressed_vocab_size=800, layers=(1,), prime_base=9_000)
        return HashPlan.from_model(model, 1, token_map)
    qwen = qwen_ple_model(family, eos_id=5, vocabulary=1_000, prime_base=9_000, row=RowLayout(160, 160, "fp8_e4m3"))
    return HashPlan.from_model(qwen, 0, None)


def random_windows(rng: np.random.Generator, count: int) -> Windows:
    starts = np.array([0, count // 3, count // 3, count], dtype=np.int32)
    lookback = rng.integers(-1, 1_000, (3, 3))
    return Windows(rng.integers(0, 1_000, count), starts, lookback, rng.random(count) < 0.1, rng.random((3, 3)) < 0.1)


@pytest.mark.parametrize(("family", "row_bytes"), [("demo", 320), ("v41", 264), ("qwen", 160), ("demo", 77)])
def test_a_lookup_is_a_hash_and_a_gather(kernels: ModuleType, family: str, row_bytes: int) -> None:
    plan, rng = small_plan(family), np.random.default_rng(5)
    table = rng.integers(0, 256, (plan.rows_hashed + 3, row_bytes), dtype=np.uint8)
    for count in (0, 1, 3, 85, 86, 128, 129, 1_000):  # around the blocks of the fused loop
        windows = random_windows(rng, count)
        out = np.full((count, plan.columns, row_bytes), FILLED, dtype=np.uint8)
        kernels.lookup(plan, table, windows, out)
        assert (out == table[kernels.row_ids(plan, windows)]).all()


def test_a_lookup_that_does_not_fit_leaves_out_untouched(kernels: ModuleType) -> None:
    plan, rng = small_plan("demo"), np.random.default_rng(6)
    table = np.zeros((plan.rows_hashed, 320), dtype=np.uint8)
    windows = random_windows(rng, 5)
    out = np.full((5, 16, 320), FILLED, dtype=np.uint8)
    strange = Windows(np.full(5, 1_000), windows.starts, windows.lookback)
    for message, call in {
        "table: .* the hash reaches": (plan, table[:-1], windows, out),
        "table: uint8": (plan, table.astype(np.int8), windows, out),
        "out: ": (plan, table, windows, out[:4]),
        "lookback: 3 columns": (small_plan_of_order_5(), np.zeros((100_000, 320), dtype=np.uint8), windows, out),
        "tokens: id 1000 at 0": (plan, table, strange, out),
    }.items():
        with pytest.raises(InvalidArgument, match=message):
            kernels.lookup(*call)
    assert (out == FILLED).all()


def small_plan_of_order_5() -> HashPlan:
    token_map = np.arange(1_000, dtype=np.int32)
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    model = demo_model("five", layers=(0,), token_map=digest, compressed_vocab_size=1_000, pad_id=1, prime_base=20, orders=(5,),
                       row=RowLayout(320, 160, "bf16"))  # fmt: skip
    return HashPlan.from_model(model, 0, token_map)


def longest_pause(run: threading.Thread) -> tuple[float, float]:
    """(longest time between two looks at the clock while `run` runs, time that it ran)."""
    pause, started = 0.0, time.perf_counter()
    before = started
    run.start()
    while run.is_alive():
        now = time.perf_counter()
        pause, before = max(pause, now - before), now
    return pause, time.perf_counter() - started


@pytest.mark.parametrize("kernel", ["row_ids", "gather_rows", "lookup", "crc32c", "dequantise", "nearest"])
def test_python_goes_on_while_a_native_kernel_runs(kernel: str) -> None:
    native = pytest.importorskip("treadle.kernels.native", reason="the extension was not built", exc_type=ImportError)
    plan, rng, count = small_plan("qwen"), np.random.default_rng(7), 1 << 20
    table = np.zeros((plan.rows_hashed, 16), dtype=np.uint8)
    windows = Windows(rng.integers(0, 1_000, count), np.array([0, count], dtype=np.int32), np.full((1, 2), -1))
    ids = native.row_ids(plan, windows)
    out = np.zeros((count, plan.columns, 16), dtype=np.uint8)
    packed, numbers = np.ones((400_000, 18), dtype=np.uint8), np.empty((400_000, 32), dtype=np.float32)
    queries, keys = np.ones((64, 256), dtype=np.float32), np.ones((20_000, 256), dtype=np.int8)
    scales = np.ones(20_000, dtype=np.float16)
    calls = {
        "row_ids": lambda: native.row_ids(plan, windows, ids),
        "gather_rows": lambda: native.gather_rows(table, ids, out),
        "lookup": lambda: native.lookup(plan, table, windows, out),
        "crc32c": lambda: native.crc32c(out.reshape(-1)),
        "dequantise": lambda: native.dequantise(packed, RowLayout(18, 32, "int4", Scale("fp16", 32)), numbers),
        "nearest": lambda: native.nearest(queries, keys, scales),
    }
    share, until = 1.0, time.perf_counter() + 20
    while share >= 0.5 and time.perf_counter() < until:  # a busy machine stops us too: once is enough to show that nothing holds us
        pause, took = longest_pause(threading.Thread(target=calls[kernel]))
        share = pause / took
    assert share < 0.5
