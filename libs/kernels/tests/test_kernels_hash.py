"""Row ids: golden values, the window's rules against a plain re-telling of them, and what is refused."""

import hashlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import EngramModel, Family, FingerprintMismatch, InvalidArgument, RowLayout, Windows
from treadle.contract.families import deepseek_v41_model, demo_model, qwen_ple_model
from treadle.kernels import HashPlan, reference

FORMS = ["native", "reference"]
IDENTITY = np.arange(100_000, dtype=np.int32)
DEMO_ROW, QWEN_ROW = RowLayout(128, 64, "bf16"), RowLayout(160, 160, "fp8_e4m3")


@pytest.fixture(params=FORMS)
def kernels(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(f"treadle.kernels.{request.param}", reason="the extension was not built", exc_type=ImportError)


def digest(token_map: NDArray[np.int32]) -> str:
    return hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()


def demo(token_map: NDArray[np.int32] = IDENTITY, size: int = 100_000, pad_id: int = 2) -> EngramModel:
    return demo_model(
        "demo",
        layers=(1, 15),
        token_map=digest(token_map),
        compressed_vocab_size=size,
        pad_id=pad_id,
        prime_base=646_400,
        row=DEMO_ROW,
    )


def one_request(*ids: int, depth: int = 2, before: tuple[int, ...] = (), dead: tuple[int, ...] = ()) -> Windows:
    lookback = np.full((1, depth), -1, dtype=np.int64)
    lookback[0, : len(before)] = before
    mask = np.isin(np.arange(len(ids)), dead) if dead else None
    return Windows(np.array(ids, dtype=np.int64), np.array([0, len(ids)], dtype=np.int32), lookback, mask)


def sha(array: NDArray[np.int64]) -> str:
    return hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("layer", "rows", "first", "golden"),
    [(1, 10_344_164, [558947, 454852], "bfb8cbda2ee72041"), (15, 10_348_242, [166620, 599923], "4fb00128f75039ad")],
)
def test_the_demo_family_gives_its_golden_columns(
    kernels: ModuleType, layer: int, rows: int, first: list[int], golden: str
) -> None:
    plan = HashPlan.from_model(demo(), layer, IDENTITY)
    columns = kernels.row_ids(plan, one_request(11, 222, 3333, 44444, 5, 5, 98765)) - plan.offsets
    assert columns[0, :2].tolist() == first
    assert sha(columns).startswith(golden)
    assert plan.rows_hashed == rows


def test_the_qwen_family_gives_its_golden_rows(kernels: ModuleType) -> None:
    plan = HashPlan.from_model(qwen_ple_model("qwen", row=QWEN_ROW), 0, None)
    rows = kernels.row_ids(plan, one_request(248044, 1000, 99999, 42))
    assert rows[1, :2].tolist() == [1876085, 31308566]
    assert sha(rows).startswith("7acc73336e680db8")
    assert plan.rows_hashed == 320_001_446
    assert plan.multipliers.tolist() == [23703573157769, 20109073645365, 8052911324071]


def test_the_deepseek_family_has_its_published_totals_and_multipliers() -> None:
    token_map = np.arange(99_092, dtype=np.int32)
    model = deepseek_v41_model("v41", token_map=digest(token_map), pad_id=2)
    first, second = (HashPlan.from_model(model, layer, token_map) for layer in (1, 14))
    assert (first.rows_hashed, second.rows_hashed) == (384_006_168, 384_016_682)
    assert first.multipliers.tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert second.multipliers.tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def told_plainly(plan: HashPlan, windows: Windows) -> list[list[int]]:
    """The definition, one Python integer at a time."""
    rows = []
    for request in range(windows.lookback.shape[0]):
        start, end = int(windows.starts[request]), int(windows.starts[request + 1])
        back = [(int(t), bool(windows.lookback_dead[request, j]) if windows.lookback_dead is not None else False)
                for j, t in enumerate(windows.lookback[request])][::-1]  # fmt: skip
        inside = [(int(windows.tokens[i]), bool(windows.dead[i]) if windows.dead is not None else False) for i in range(start, end)]
        history = back + inside
        for position in range(len(back), len(history)):
            ids, blocked = [], False
            for k in range(plan.order_max):
                token, dead = history[position - k]
                blocked |= dead or token < 0 or (k > 0 and plan.family is Family.QWEN_PLE and token == plan.eos)
                ids.append(plan.pad if blocked else token if plan.token_map is None else int(plan.token_map[token]))
            row = []
            for index, order in enumerate(plan.orders.tolist()):
                mix = 0
                for k in range(order):
                    mix ^= ids[k] * int(plan.multipliers[k])
                columns = range(index * plan.heads, (index + 1) * plan.heads)
                row += [mix % int(plan.primes[column]) + sum(plan.primes.tolist()[:column]) for column in columns]
            rows.append(row)
    return rows


def plans() -> list[HashPlan]:
    rng = np.random.default_rng(5)
    token_map = rng.integers(0, 700, 1000).astype(np.int32)
    v41 = deepseek_v41_model("v41", token_map=digest(token_map), pad_id=7, compressed_vocab_size=700, prime_base=9_000)
    tiny = demo_model("tiny", layers=(0,), token_map=digest(token_map), compressed_vocab_size=700, pad_id=7, prime_base=50,
                      orders=(1, 3, 5), heads=3, row=DEMO_ROW)  # fmt: skip
    return [
        HashPlan.from_model(demo(token_map, 700, 7), 15, token_map),
        HashPlan.from_model(v41, 14, token_map),
        HashPlan.from_model(tiny, 0, token_map),
        HashPlan.from_model(qwen_ple_model("qwen", eos_id=3, vocabulary=1000, row=QWEN_ROW), 0, None),
    ]


@pytest.mark.parametrize("plan", plans(), ids=["demo", "v41", "odd orders and heads, small primes", "qwen"])
def test_every_rule_of_the_window_holds_token_by_token(kernels: ModuleType, plan: HashPlan) -> None:
    rng = np.random.default_rng(11)
    for _ in range(20):
        lengths = rng.integers(0, 9, rng.integers(1, 6))
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = np.where(rng.random(starts[-1]) < 0.2, 3, rng.integers(0, 1000, starts[-1]))
        lookback = rng.integers(-1, 1000, (lengths.size, plan.order_max))  # one column more than needed
        lookback[rng.random(lookback.shape) < 0.2] = 3
        for masks in (
            (None, None),
            (rng.random(starts[-1]) < 0.2, None),
            (rng.random(starts[-1]) < 0.1, rng.random(lookback.shape) < 0.2),
        ):
            windows = Windows(tokens, starts, lookback, *masks)
            assert kernels.row_ids(plan, windows).tolist() == told_plainly(plan, windows)


def test_what_lies_behind_a_dead_token_is_not_looked_at(kernels: ModuleType) -> None:
    plan = plans()[1]
    other = kernels.row_ids(plan, one_request(10, 11, 12, 13, 14, depth=3, before=(5, 6, 7), dead=(2,)))
    same = kernels.row_ids(plan, one_request(98, 99, 97, 13, 14, depth=3, before=(1, 2, 3), dead=(2,)))
    assert (other[2:] == same[2:]).all()
    assert not (other[:2] == same[:2]).all()


def test_a_dead_token_reads_pad_and_keeps_its_rows_in_range(kernels: ModuleType) -> None:
    plan = plans()[0]
    rows = kernels.row_ids(plan, one_request(10, 10**9, 12, before=(5, 6), dead=(1,)))  # a dead id need not be in the vocabulary
    padded = kernels.row_ids(plan, one_request(7))
    assert (rows[1] == padded[0]).all()
    assert ((rows >= plan.offsets) & (rows < plan.offsets + plan.primes)).all()


def test_an_eos_as_the_current_token_still_sees_what_came_before(kernels: ModuleType) -> None:
    plan = plans()[3]
    seen = kernels.row_ids(plan, one_request(8, 3))
    assert not (seen[1] == kernels.row_ids(plan, one_request(9, 3))[1]).all()
    assert (kernels.row_ids(plan, one_request(8, 3, 5))[2] == kernels.row_ids(plan, one_request(5))[0]).all()


def test_rows_are_written_into_the_array_that_is_given(kernels: ModuleType) -> None:
    plan, windows = plans()[0], one_request(1, 2, 3)
    out = np.full((3, 16), -5, dtype=np.int64)
    assert kernels.row_ids(plan, windows, out) is out
    assert (out == reference.row_ids(plan, windows)).all()


def test_no_tokens_and_no_requests_give_no_rows(kernels: ModuleType) -> None:
    nothing = Windows(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int32), np.zeros((0, 3), dtype=np.int64))
    for plan in plans()[:2]:
        assert kernels.row_ids(plan, nothing).shape == (0, plan.columns)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (one_request(1, 1000, depth=3), "tokens: id 1000 at 1"),
        (one_request(1, 2**62, depth=3), "tokens: id"),
        (one_request(1, depth=3, before=(5, 1000)), "lookback: id 1000 at 1"),
        (one_request(1, depth=2), "lookback: 2 columns, orders up to 4 need 3"),
    ],
)
def test_ids_and_look_backs_that_do_not_fit_are_refused(kernels: ModuleType, windows: Windows, message: str) -> None:
    out = np.full((windows.token_count, 24), -5, dtype=np.int64)
    with pytest.raises(InvalidArgument, match=message):
        kernels.row_ids(plans()[1], windows, out)
    assert (out == -5).all()


def test_raw_ids_whose_product_would_overflow_are_refused(kernels: ModuleType) -> None:
    plan = plans()[3]
    largest = plan.token_limit - 1
    assert largest * int(plan.multipliers.max()) < 2**63 <= (largest + 1) * int(plan.multipliers.max())
    assert kernels.row_ids(plan, one_request(largest, largest)).tolist() == told_plainly(plan, one_request(largest, largest))
    with pytest.raises(InvalidArgument, match="tokens: id"):
        kernels.row_ids(plan, one_request(largest + 1))


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 24), dtype=np.int64),
        np.zeros((1, 24), dtype=np.int32),
        np.zeros((24, 1), dtype=np.int64).T[:, ::2],
        np.zeros((1, 48), dtype=np.int64)[:, ::2],
        np.frombuffer(bytes(24 * 8), dtype=np.int64).reshape(1, 24),
    ],
)
def test_an_out_array_that_does_not_fit_is_refused(kernels: ModuleType, out: NDArray[np.int64]) -> None:
    with pytest.raises(InvalidArgument, match="out: "):
        kernels.row_ids(plans()[1], one_request(1, depth=3), out)


def test_another_token_map_is_a_fingerprint_mismatch() -> None:
    with pytest.raises(FingerprintMismatch, match="token_map") as raised:
        HashPlan.from_model(demo(), 1, IDENTITY[::-1].copy())
    assert raised.value.field == "token_map"


@pytest.mark.parametrize(
    ("model", "layer", "token_map", "message"),
    [
        (demo(), 1, None, "token_map: demo needs its map"),
        (demo(), 2, IDENTITY, "layer 2"),
        (demo(), 1, IDENTITY.astype(np.int64), "int32"),
        (qwen_ple_model("qwen", row=QWEN_ROW), 0, IDENTITY, "pass None"),
        (demo(IDENTITY - 1), 1, IDENTITY - 1, "compressed ids lie in"),
        (demo(IDENTITY, 99_999), 1, IDENTITY, "compressed ids lie in"),
        (demo(IDENTITY, pad_id=100_000), 1, IDENTITY, "pad_id"),
        (qwen_ple_model("qwen", eos_id=2**30, row=QWEN_ROW), 0, None, "pad_id"),
    ],
)
def test_a_plan_is_refused_where_its_numbers_do_not_fit(
    model: EngramModel, layer: int, token_map: NDArray[np.int32] | None, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        HashPlan.from_model(model, layer, token_map)


def test_a_plan_keeps_its_own_copy_of_the_token_map() -> None:
    token_map = IDENTITY.copy()
    plan = HashPlan.from_model(demo(), 1, token_map)
    token_map[:] = -1
    assert plan.token_map is not None
    assert (plan.token_map == IDENTITY).all()
    assert not plan.token_map.flags.writeable
