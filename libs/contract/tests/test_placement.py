import functools
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.contract import EngramModel, InvalidArgument, RowLayout, Table
from treadle.contract.families import demo_model
from treadle.contract.placement import (
    OWNERS_MAX,
    STRETCH_ROWS_MIN,
    STRETCHES_MAX,
    STRETCHES_WANTED,
    Spread,
    held_by,
    joined,
    owners_of,
    seed_of,
    stretches,
)

MAP = "ab" * 32
NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), min_size=1, max_size=8, unique=True)


@functools.cache
def model(prime_base: int = 20_000, spare: int = 0) -> EngramModel:
    made = demo_model("m", layers=(2, 15), token_map=MAP, compressed_vocab_size=40_000, pad_id=2, prime_base=prime_base,
                      row=RowLayout(320, 160, "bf16"))  # fmt: skip
    return made.with_tables({layer: Table(made.rows_hashed(layer) + spare, MAP) for layer in made.layers})


@settings(deadline=None)
@given(st.sampled_from([50, 1_000, 5_000, 30_000]), st.integers(STRETCH_ROWS_MIN, 40_000), st.sampled_from([0, 1, 5_000]))
def test_stretches_cover_the_table_once_and_cross_no_head(prime_base: int, stretch_rows: int, spare: int) -> None:
    made = model(prime_base, spare)
    cut = stretches(made, 2, stretch_rows)
    heads = [0, *itertools.accumulate(itertools.chain(*made.primes[0]))]
    assert cut[0].first == 0
    assert cut[-1].last == made.table(2).rows
    assert all(a.last == b.first for a, b in itertools.pairwise(cut))
    assert all(heads[s.head] <= s.first < s.last <= heads[s.head + 1] for s in cut[:-1])
    assert all(s.last - s.first <= stretch_rows for s in cut[:-1])


def test_the_fabrics_own_choice_is_fine_enough_to_balance_and_bounded() -> None:
    large = model(2_000_000)
    count = len(stretches(large, 2))
    assert STRETCHES_WANTED <= count <= STRETCHES_WANTED + large.columns
    assert len(stretches(model(50), 2)) == large.columns  # never finer than a head needs
    with pytest.raises(InvalidArgument, match=f"limit is {STRETCHES_MAX}"):
        stretches(large, 2, STRETCH_ROWS_MIN)


@settings(deadline=None)
@given(NAMES, st.data())
def test_owners_are_distinct_and_do_not_depend_on_the_order_of_the_names(names: list[str], data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, len(names)))
    shuffled = data.draw(st.permutations(names))
    for stretch in stretches(model(), 15)[:20]:
        owners = owners_of(stretch, MAP, names, replicas)
        assert len(set(owners)) == replicas
        assert set(owners) <= set(names)
        assert owners == owners_of(stretch, MAP, shuffled, replicas)


@settings(deadline=None)
@given(NAMES, st.from_regex(r"[0-9]{3}", fullmatch=True), st.integers(1, 3))
def test_an_owner_that_joins_takes_its_own_and_moves_nothing_else(names: list[str], newcomer: str, replicas: int) -> None:
    replicas = min(replicas, len(names))
    for stretch in stretches(model(), 2)[:40]:
        before, after = (owners_of(stretch, MAP, owners, replicas) for owners in (names, [*names, newcomer]))
        assert after == before or [owner for owner in after if owner != newcomer] == list(before[: replicas - 1])


def test_shares_are_balanced() -> None:
    made, spread = model(400_000), Spread(("a", "b", "c", "d"), 2)
    shares = [sum(int(np.diff(ranges).sum()) for ranges in held_by(owner, made, spread).values()) for owner in spread.owners]
    total = sum(made.table(layer).rows for layer in made.layers)
    assert sum(shares) == 2 * total  # every row twice
    assert max(shares) < 1.15 * total / 2
    assert min(shares) > 0.85 * total / 2


def test_every_row_is_held_by_exactly_as_many_owners_as_asked() -> None:
    made, spread = model(3_000, spare=77), Spread(("a", "b", "c"), 2, 1024)
    for layer in made.layers:
        count = np.zeros(made.table(layer).rows, dtype=np.int64)
        for owner in spread.owners:
            ranges = held_by(owner, made, spread)[layer]
            assert (ranges[1:, 0] > ranges[:-1, 1]).all()  # joined: no neighbour begins where the one before ends
            for first, last in ranges:
                count[first:last] += 1
        assert (count == 2).all()


def test_owners_are_known_before_the_tables_are() -> None:
    loaded = model()
    assert seed_of(loaded) == seed_of(loaded.template)


def test_another_process_computes_the_same_owners() -> None:
    # A value that is written down: what one release places must be found by the next.
    program = (
        "from treadle.contract.placement import Stretch, owners_of;"
        "print(owners_of(Stretch(2, 0, 4096, 8192), 'ab' * 32, ['a', 'b', 'c', 'd', 'e'], 3))"
    )
    run = subprocess.run([sys.executable, "-R", "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "('a', 'e', 'd')"


@pytest.mark.parametrize(
    ("owners", "replicas", "stretch_rows", "said"),
    [
        ((), 1, 0, "owners"),
        (("a", "a"), 1, 0, "different"),
        (("a/b",), 1, 0, "name"),
        (tuple(f"o{n}" for n in range(OWNERS_MAX + 1)), 1, 0, f"1 to {OWNERS_MAX}"),
        (("a",), 2, 0, "replicas: 1 to 1"),
        (("a",), 0, 0, "replicas"),
        (("a",), 1, 5, "stretch_rows"),
    ],
)
def test_a_wrong_spread_says_what_is_wrong(owners: tuple[str, ...], replicas: int, stretch_rows: int, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Spread(owners, replicas, stretch_rows)


def test_an_unknown_owner_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'z'"):
        held_by("z", model(), Spread(("a", "b"), 1))


def test_ranges_must_rise() -> None:
    assert joined([(0, 5), (5, 9), (12, 13)]).tolist() == [[0, 9], [12, 13]]
    for wrong in ([(5, 5)], [(0, 5), (4, 9)], [(-1, 2)]):
        with pytest.raises(InvalidArgument, match="ranges"):
            joined(wrong)
