"""Two ways to the same row ids: native and numpy, and one long pass and any cutting of it into steps."""

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import RowLayout, Windows
from treadle.contract.families import deepseek_v41_model, demo_model, qwen_ple_model
from treadle.kernels import HashPlan, reference

native = pytest.importorskip("treadle.kernels.native", reason="the extension was not built", exc_type=ImportError)

SWEEP_TOKENS = (
    250_000  # for each of the five plans: 1.25 million in all, each hashed in one pass and in pieces, natively and in numpy
)
SEQUENCE_TOKENS = 10_000
VOCABULARY, EOS = 5_000, 17
ROW = RowLayout(64, 32, "bf16")


def make_plans() -> dict[str, HashPlan]:
    token_map = np.random.default_rng(0).integers(0, 4_000, VOCABULARY).astype(np.int32)
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    shape = {"layers": (1, 15), "token_map": digest, "compressed_vocab_size": 4_000, "pad_id": 2, "row": ROW}
    models = {
        "demo": demo_model("demo", prime_base=646_400, **shape),  # type: ignore[arg-type]
        "demo, small primes": demo_model("small", prime_base=100, **shape),  # type: ignore[arg-type]
        "demo, odd shape": demo_model("odd", prime_base=20_000, orders=(1, 2, 6), heads=11, **shape),  # type: ignore[arg-type]
        "v41": deepseek_v41_model("v41", token_map=digest, pad_id=2, compressed_vocab_size=4_000, layers=(1, 15)),
    }
    plans = {name: HashPlan.from_model(model, 15, token_map) for name, model in models.items()}
    return plans | {"qwen": HashPlan.from_model(qwen_ple_model("qwen", eos_id=EOS, vocabulary=VOCABULARY, row=ROW), 0, None)}


PLANS = make_plans()
Sequence = tuple[NDArray[np.int64], NDArray[np.bool_]]


def random_sequence(rng: np.random.Generator, count: int) -> Sequence:
    tokens = rng.integers(0, VOCABULARY, count)
    tokens[rng.random(count) < 0.05] = EOS
    dead = np.zeros(count, dtype=np.bool_)
    for begin in rng.integers(0, count, count // 100):
        dead[begin : begin + rng.integers(1, 12)] = True
    return tokens, dead


def step(plan: HashPlan, pieces: list[tuple[Sequence, int, int]]) -> Windows:
    """The windows of a step that runs tokens [begin, end) of each sequence."""
    depth = plan.order_max - 1
    lookback = np.full((len(pieces), depth), -1, dtype=np.int64)
    lookback_dead = np.zeros((len(pieces), depth), dtype=np.bool_)
    for row, ((tokens, dead), begin, _) in enumerate(pieces):
        near = slice(max(0, begin - depth), begin)
        lookback[row, : begin - near.start] = tokens[near][::-1]
        lookback_dead[row, : begin - near.start] = dead[near][::-1]
    starts = np.cumsum([0, *(end - begin for _, begin, end in pieces)]).astype(np.int32)
    tokens = np.concatenate([tokens[begin:end] for (tokens, _), begin, end in pieces])
    dead = np.concatenate([dead[begin:end] for (_, dead), begin, end in pieces])
    return Windows(tokens, starts, lookback, dead, lookback_dead)


def cuts(rng: np.random.Generator, count: int, mean: int) -> Iterator[tuple[int, int]]:
    edges = np.unique(np.concatenate([[0, count], rng.integers(0, count, count // mean)])).tolist()
    yield from pairwise(edges)


@pytest.mark.parametrize("name", PLANS)
def test_native_and_numpy_agree_on_long_passes_and_on_any_cutting_of_them(name: str) -> None:
    plan, rng, mismatches = PLANS[name], np.random.default_rng([1, len(name)]), 0
    for mean in np.resize([3, 40, 400, 4_000], SWEEP_TOKENS // SEQUENCE_TOKENS).tolist():
        sequence = random_sequence(rng, SEQUENCE_TOKENS)
        whole = step(plan, [(sequence, 0, SEQUENCE_TOKENS)])
        expected = reference.row_ids(plan, whole)
        mismatches += int((native.row_ids(plan, whole) != expected).sum())
        assert ((expected >= plan.offsets) & (expected < plan.offsets + plan.primes)).all()
        for begin, end in cuts(rng, SEQUENCE_TOKENS, mean):
            piece = step(plan, [(sequence, begin, end)])
            form = native if begin % 4 else reference
            mismatches += int((form.row_ids(plan, piece) != expected[begin:end]).sum())
    assert mismatches == 0


@pytest.mark.parametrize("name", PLANS)
def test_requests_of_one_step_do_not_see_each_other(name: str) -> None:
    plan, rng = PLANS[name], np.random.default_rng(2)
    for _ in range(30):
        sequences = [random_sequence(rng, int(count)) for count in rng.integers(1, 60, 9)]
        pieces = []
        for sequence in sequences:
            begin, end = np.sort(rng.integers(0, sequence[0].size + 1, 2)).tolist()  # may be empty
            pieces.append((sequence, begin, end))
        together = step(plan, pieces)
        alone = [reference.row_ids(plan, step(plan, [(s, 0, s[0].size)]))[begin:end] for s, begin, end in pieces]
        for form in (native, reference):
            assert (form.row_ids(plan, together) == np.concatenate(alone)).all()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("form", [native, reference])
def test_a_suffix_run_again_after_a_rollback_equals_a_run_from_the_start(name: str, form: object) -> None:
    plan, rng, row_ids = PLANS[name], np.random.default_rng(3), form.row_ids  # type: ignore[attr-defined]
    tokens, dead = random_sequence(rng, 200)
    rows = row_ids(plan, step(plan, [((tokens, dead), 0, 200)]))
    for _ in range(40):  # draft some tokens, keep a few, draft others from there
        kept = int(rng.integers(0, tokens.size))
        more, more_dead = random_sequence(rng, int(rng.integers(1, 20)))
        tokens, dead = np.concatenate([tokens[:kept], more]), np.concatenate([dead[:kept], more_dead])
        again = row_ids(plan, step(plan, [((tokens, dead), kept, tokens.size)]))
        rows = np.concatenate([rows[:kept], again])
        assert (rows == row_ids(plan, step(plan, [((tokens, dead), 0, tokens.size)]))).all()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_native_and_numpy_agree_on_whatever_hypothesis_finds(data: st.DataObject) -> None:
    plan = PLANS[data.draw(st.sampled_from(sorted(PLANS)))]
    depth = plan.order_max - 1
    ids = st.one_of(st.sampled_from([0, EOS, VOCABULARY - 1]), st.integers(0, VOCABULARY - 1))
    lengths = data.draw(st.lists(st.integers(0, 7), max_size=5))
    count = sum(lengths)
    tokens = np.array(data.draw(st.lists(ids, min_size=count, max_size=count)), dtype=np.int64)
    back = len(lengths) * depth
    lookback = np.array(data.draw(st.lists(st.one_of(st.just(-1), ids), min_size=back, max_size=back)), dtype=np.int64)
    dead = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=np.bool_)
    lookback_dead = np.array(data.draw(st.lists(st.booleans(), min_size=back, max_size=back)), dtype=np.bool_)
    shape = (len(lengths), depth)
    windows = Windows(
        tokens,
        np.cumsum([0, *lengths]).astype(np.int32),
        lookback.reshape(shape),
        dead if data.draw(st.booleans()) else None,
        lookback_dead.reshape(shape) if data.draw(st.booleans()) else None,
    )
    assert (native.row_ids(plan, windows) == reference.row_ids(plan, windows)).all()


@pytest.mark.parametrize("prime", [2, 3, 8191, 8209, 16_777_213, 2**31 - 1, 2**40 - 87])
def test_the_remainder_is_exact_at_the_edges(prime: int) -> None:
    rng = np.random.default_rng(prime)
    primes = np.array([prime], dtype=np.int64)
    for multiplier in (1, prime, (1 << 40) + 1, (1 << 62) + 1):
        limit = (2**63 - 1) // multiplier + 1
        plan = HashPlan(
            family=PLANS["qwen"].family, order_max=1, orders=np.array([1], dtype=np.int32), heads=1,
            multipliers=np.array([multiplier], dtype=np.uint64), primes=primes, offsets=np.zeros(1, dtype=np.int64), pad=0, eos=-1,
            token_map=None, rows_hashed=prime, token_limit=min(limit, 2**63 - 1),
        )  # fmt: skip
        near = rng.integers(0, max(1, limit // prime), 2_000).astype(object) * prime
        wanted = np.concatenate(
            [near + shift for shift in (-1, 0, 1)] + [rng.integers(0, min(limit, 2**63 - 1), 2_000).astype(object)]
        )
        tokens = np.array(
            [t for t in wanted.tolist() if 0 <= t < min(limit, 2**63 - 1)] + [0, min(limit, 2**63 - 1) - 1], dtype=np.int64
        )
        windows = Windows(tokens, np.array([0, tokens.size], dtype=np.int32), np.zeros((1, 0), dtype=np.int64))
        exact = [token * multiplier % prime for token in tokens.tolist()]
        assert native.row_ids(plan, windows)[:, 0].tolist() == exact
        assert reference.row_ids(plan, windows)[:, 0].tolist() == exact
