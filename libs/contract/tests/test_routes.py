import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.contract import EngramModel, InvalidArgument, RowLayout, Table
from treadle.contract.families import demo_model
from treadle.contract.owners import Door, Holding, Owner
from treadle.contract.placement import Spread, held_by, owners_of, seed_of, stretches
from treadle.contract.routes import NOBODY, gaps_text, routes_to

MAP = "ab" * 32


@functools.cache
def model(prime_base: int = 3_000) -> EngramModel:
    made = demo_model("m", layers=(2, 15), token_map=MAP, compressed_vocab_size=40_000, pad_id=2, prime_base=prime_base,
                      row=RowLayout(320, 160, "bf16"))  # fmt: skip
    return made.with_tables({layer: Table(made.rows_hashed(layer) + 9, MAP) for layer in made.layers})


def owner(name: str, ranges: list[tuple[int, int]] | None = None) -> Owner:
    made = model()
    held = {layer: [(0, made.table(layer).rows)] if ranges is None else ranges for layer in made.layers}
    return Owner(name, "127.0.0.1:1", (), (Holding("m", made.version, held),))


def asked(layer: int, owners: list[Owner]) -> np.ndarray:
    """The first owner of every row, int32 [rows]."""
    routes = routes_to(model(), layer, owners)
    assert routes.bounds[0] == 0
    assert routes.bounds[-1] == model().table(layer).rows
    return np.repeat(routes.owners[:, 0], np.diff(routes.bounds))


RANGES = st.lists(st.integers(0, 48_000), min_size=0, max_size=10, unique=True).map(
    lambda cuts: [(a, b) for a, b in zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)]
)


@settings(deadline=None)
@given(st.lists(RANGES, min_size=1, max_size=4))
def test_every_row_is_asked_of_an_owner_that_holds_it_or_of_nobody(held: list[list[tuple[int, int]]]) -> None:
    owners = [owner(f"o{n}", ranges) for n, ranges in enumerate(held)]
    holds = np.zeros((len(owners), model().table(2).rows), dtype=np.bool_)
    for n, ranges in enumerate(held):
        for first, last in ranges:
            holds[n, first:last] = True
    routes = routes_to(model(), 2, owners)
    chosen = np.repeat(routes.owners, np.diff(routes.bounds), axis=0)
    for rank in range(chosen.shape[1]):
        named = chosen[:, rank] != NOBODY
        assert holds[chosen[named, rank], np.flatnonzero(named)].all()
    assert ((chosen != NOBODY).sum(axis=1) == np.minimum(holds.sum(axis=0), chosen.shape[1])).all()
    assert all(len(set(row)) == len(row) for row in (line[line != NOBODY].tolist() for line in routes.owners))


def test_owners_of_whole_tables_are_asked_evenly() -> None:
    share = np.bincount(asked(2, [owner("a"), owner("b"), owner("c")])) / model().table(2).rows
    assert (share > 0.2).all()


def test_where_owners_hold_what_is_theirs_the_one_that_owns_a_stretch_is_asked() -> None:
    made, spread = model(), Spread(("a", "b", "c"), 2)
    owners = []
    for name in spread.owners:
        held = {layer: [(int(a), int(b)) for a, b in ranges] for layer, ranges in held_by(name, made, spread).items()}
        owners.append(Owner(name, "h:1", (), (Holding("m", made.version, held),)))
    routes = routes_to(made, 15, owners)
    chosen = np.repeat(routes.owners, np.diff(routes.bounds), axis=0)
    for stretch in stretches(made, 15):
        expected = [spread.owners.index(name) for name in owners_of(stretch, seed_of(made), spread.owners, 2)]
        assert (chosen[stretch.first : stretch.last] == [*expected, NOBODY]).all()


def test_those_who_leave_or_are_not_heard_of_stand_behind_the_others() -> None:
    alive, dead, leaving = owner("a"), owner("b").unreachable(), replace(owner("c"), leaving=True)
    assert (routes_to(model(), 2, [leaving, dead, alive]).owners == [2, 1, 0]).all()
    assert (asked(2, [leaving, dead]) == 1).all()
    assert (asked(2, [leaving]) == 0).all()


def test_rows_that_nobody_holds_are_named() -> None:
    owners = [owner("a", [(0, 100), (200, 48_000)])]
    routes = {2: routes_to(model(), 2, owners)}
    last = model().table(2).rows
    assert routes[2].unheld().tolist()[0] == [100, 200]
    assert gaps_text(routes).startswith("layer 2 rows 100 to 200")
    assert gaps_text({2: routes_to(model(), 2, [owner("a")])}) == ""
    nobody = routes_to(model(), 2, [])
    assert (nobody.bounds.tolist(), nobody.owners.tolist()) == ([0, last], [[NOBODY]])


def test_another_version_is_not_taken_for_this_one() -> None:
    stranger = replace(owner("a"), holdings=(Holding("m", "cd" * 32, {2: [(0, 10)]}),))
    assert (asked(2, [stranger]) == NOBODY).all()


def test_an_owner_that_says_more_than_there_is_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="owner a says it holds rows to 99999999"):
        routes_to(model(), 2, [owner("a", [(0, 99_999_999)])])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (lambda: Owner("a", "nowhere"), "host:port"),
        (lambda: Owner("a/b", "h:1"), "name"),
        (lambda: Owner("a", "h:1", epoch=-1), "epoch"),
        (lambda: Owner("a", "h:1", tuple(Door("socket", f"h:{n}") for n in range(9))), "doors"),
        (lambda: Holding("m", MAP, {1: [(5, 3)]}), "ranges"),
        (lambda: Holding("m", "1", {}), "version"),
    ],
)
def test_an_entry_beyond_its_limits_is_refused(entry: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        entry()
