"""One dictionary looked up: every way of searching, every row dtype, and the guard."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.contract.dictionary import Dictionary, Grouping, KeyMode, Positions, RowDtype, tensor_name
from treadle.contract.dictionary_file import TENSORS_FILE, map_tensors, write_folder
from treadle.contract.errors import InvalidArgument, NotFound
from treadle.nn.entry_search import GraphSearch
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import Found, PrefixMemory, PrefixUse

Make = Callable[..., tuple[Dictionary, dict[str, Any]]]
MANY = 104


@pytest.fixture(scope="module")
def states(tiny: CausalLM, collected: type) -> Any:
    """States of 150 random queries in layers 0 and 2, near each other in groups as those of real tokens are."""
    draw, config = torch.Generator().manual_seed(5), tiny.config
    kept = collected()
    for layer in (0, 2):
        centres = torch.randn(15, config.heads, config.head_dim, generator=draw)[torch.arange(150) % 15]
        queries, rotated = (centres + 0.4 * torch.randn(centres.shape, generator=draw) for _ in range(2))
        a, log_z = torch.randn(centres.shape, generator=draw), torch.randn(150, config.heads, generator=draw) * 8
        kept.take(layer, queries, rotated, a, log_z)
    return kept


def near_queries(states: Any, rows: int) -> Tensor:
    """Queries near the calibration's, in layer 2."""
    noise = torch.randn(rows, *states.layers[2][0].shape[1:], generator=torch.Generator().manual_seed(6))
    queries: Tensor = states.layers[2][0][torch.arange(rows) % 150] + 0.15 * noise
    return queries


def found(memory: PrefixMemory, queries: Tensor) -> Found:
    result = memory.lookup(2, queries, queries)
    assert result is not None
    return result


@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize("grouping", list(Grouping))
def test_every_dtype_finds_the_entry_that_plain_cosines_choose(
    tiny: CausalLM, states: Any, make_dictionary: Make, dtype: RowDtype, grouping: Grouping
) -> None:
    exact, _ = make_dictionary(tiny, states, 40, dtype=RowDtype.F32, grouping=grouping)
    plain = found(
        PrefixMemory(exact, make_dictionary(tiny, states, 40, dtype=RowDtype.F32, grouping=grouping)[1]), near_queries(states, MANY)
    )
    memory = PrefixMemory(*make_dictionary(tiny, states, 40, dtype=dtype, grouping=grouping))
    queries = near_queries(states, MANY)
    many, few = found(memory, queries), found(memory, queries[:5])
    model = tiny.config
    assert many.states.shape == (MANY, model.heads, model.head_dim)
    assert many.log_z.shape == (MANY, model.heads)
    assert many.cosines.shape == many.outside.shape == (MANY, memory.dictionary.codebooks, memory.dictionary.lookups)
    assert many.log_base == "e"
    torch.testing.assert_close(many.cosines[:5], few.cosines, atol=1e-5, rtol=0)
    assert torch.equal(many.states[:5], few.states)
    assert torch.equal(many.log_z[:5], few.log_z)
    torch.testing.assert_close(many.cosines, plain.cosines, atol=1e-2, rtol=0)
    same = (many.log_z == plain.log_z).float().mean()  # log Z tells entries apart, and is fp32 always
    assert same == 1.0 if dtype is RowDtype.F32 else same > 0.95
    rows = (many.log_z == plain.log_z).all(-1)
    torch.testing.assert_close(many.states[rows], plain.states[rows], atol=2e-2, rtol=1e-2)


def test_a_lookup_gives_back_the_state_of_the_query_that_an_entry_was_made_from(
    tiny: CausalLM, states: Any, make_dictionary: Make
) -> None:
    queries, rotated, a, log_z = states.layers[2]
    for key, grouping in ((KeyMode.PRE_ROPE, Grouping.SHARED), (KeyMode.OWN_POSITION, Grouping.INDIVIDUAL)):
        memory = PrefixMemory(*make_dictionary(tiny, states, 40, dtype=RowDtype.F32, key=key, grouping=grouping, ridge_ppm=100))
        result = memory.lookup(2, queries, rotated)
        assert result is not None
        assert torch.equal(result.states, a)
        assert torch.equal(result.log_z, log_z)
        torch.testing.assert_close(result.cosines, torch.ones(result.cosines.shape))
    unified = PrefixMemory(*make_dictionary(tiny, states, 40, dtype=RowDtype.F32, key=KeyMode.ROPE_UNIFIED, key_position=9))
    result = unified.lookup(2, queries, rotated, tiny.rope)
    assert result is not None
    assert torch.equal(result.states, a)
    with pytest.raises(InvalidArgument, match="rope"):
        unified.lookup(2, queries, rotated)
    assert unified.lookup(1, queries, rotated) is None


@pytest.mark.parametrize("dtype", [RowDtype.F32, RowDtype.I8])
def test_two_levels_that_probe_every_list_equal_a_scan_and_a_few_lists_find_nearly_all(
    tiny: CausalLM, states: Any, make_dictionary: Make, dtype: RowDtype
) -> None:
    queries = near_queries(states, MANY)
    linear = found(PrefixMemory(*make_dictionary(tiny, states, 40, dtype=dtype)), queries)
    listed = make_dictionary(tiny, states, 40, dtype=dtype, lists=12)
    every, few = (found(PrefixMemory(*listed, lists_probed=probed), queries) for probed in (12, 4))
    assert (every.log_z == linear.log_z).float().mean() > 0.99
    torch.testing.assert_close(every.cosines, linear.cosines, atol=1e-5, rtol=0)
    assert (few.log_z == linear.log_z).float().mean() > 0.9
    assert (few.cosines <= every.cosines + 1e-6).all()


def test_a_graph_finds_nearly_all_that_a_scan_finds(tiny: CausalLM, states: Any, make_dictionary: Make) -> None:
    pytest.importorskip("hnswlib", reason="hnswlib is not installed; the third index is not tested: pip install treadle-nn[hnsw]")
    made = make_dictionary(tiny, states, 40, dtype=RowDtype.I8, grouping=Grouping.INDIVIDUAL)
    queries = near_queries(states, MANY)
    scan, graph = found(PrefixMemory(*made), queries), found(PrefixMemory(*made, index="hnsw"), queries)
    assert (scan.log_z == graph.log_z).float().mean() > 0.97
    keys = 4 * sum(made[1][tensor_name(layer, "keys")].size for layer in made[0].layers)
    assert PrefixMemory(*made).copied_bytes == 0
    assert PrefixMemory(*made, index="hnsw").copied_bytes > keys
    torch.testing.assert_close(graph.cosines, scan.cosines, atol=2e-2, rtol=0)
    with pytest.raises(InvalidArgument, match="NaN"):
        found(PrefixMemory(*made, index="hnsw"), queries * torch.nan)


def test_a_graph_without_hnswlib_says_what_to_install(
    tiny: CausalLM, states: Any, make_dictionary: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    with pytest.raises(NotFound, match=r"pip install treadle-nn\[hnsw\]"):
        PrefixMemory(*make_dictionary(tiny, states, 40), index="hnsw")


@pytest.mark.parametrize("rows", [2, MANY])
def test_a_query_that_holds_nan_is_refused(tiny: CausalLM, states: Any, make_dictionary: Make, rows: int) -> None:
    queries = near_queries(states, rows)
    queries[1] = torch.nan
    with pytest.raises(InvalidArgument, match="NaN"):
        found(PrefixMemory(*make_dictionary(tiny, states, 40)), queries)


@pytest.mark.parametrize("dtype", list(RowDtype))
def test_a_mapped_file_is_looked_up_where_it_lies_by_many_threads(
    tiny: CausalLM, states: Any, make_dictionary: Make, dtype: RowDtype, tmp_path: Path
) -> None:
    dictionary, tensors = make_dictionary(tiny, states, 40, dtype=dtype, ridge_ppm=50)
    write_folder(tmp_path, dictionary, tensors)
    mapped = map_tensors(tmp_path / TENSORS_FILE, dictionary)
    assert not mapped[tensor_name(2, "keys")].flags.writeable
    memory, queries = PrefixMemory(dictionary, mapped), near_queries(states, MANY)
    expected = found(PrefixMemory(dictionary, tensors), queries)
    with ThreadPoolExecutor(4) as threads:
        for result in threads.map(lambda _: found(memory, queries), range(8)):
            assert torch.equal(result.states, expected.states)
            assert torch.equal(result.log_z, expected.log_z)


def test_positions_go_on_behind_the_prefix_or_from_zero(tiny: CausalLM, states: Any, make_dictionary: Make) -> None:
    assert PrefixMemory(*make_dictionary(tiny, states, 40)).position_offset == 40
    assert PrefixMemory(*make_dictionary(tiny, states, 40, positions=Positions.FROM_ZERO)).position_offset == 0


def test_the_guard_calls_a_lookup_outside_whose_cosine_the_calibration_hardly_knew(
    tiny: CausalLM, states: Any, make_dictionary: Make
) -> None:
    made = make_dictionary(tiny, states, 40, quantiles=(0.0, 1.0))  # so that a per cent is a hundredth of cosine
    queries = near_queries(states, 30)
    outside = []
    for percent in (0, 40, 98, 99, 100):  # the cosines lie on both sides of 0.99
        result = found(PrefixMemory(*made, guard_percent=percent), queries)
        assert torch.equal(result.outside, result.cosines < percent / 100)
        outside.append(int(result.outside.sum()))
    assert outside[0] == 0
    assert 0 < outside[-2] < outside[-1] == result.outside.numel()
    for bad in ({"guard_percent": 101}, {"lists_probed": 0}, {"index": "tree"}):
        with pytest.raises(InvalidArgument, match=next(iter(bad))):
            PrefixMemory(*made, **bad)


def test_a_request_is_off_task_when_more_than_a_share_of_its_lookups_were_outside(
    tiny: CausalLM, states: Any, make_dictionary: Make
) -> None:
    memory = PrefixMemory(*make_dictionary(tiny, states, 40))
    assert not PrefixUse(memory).off_task()
    assert not PrefixUse(memory, lookups=200, lookups_outside=50).off_task(0.25)
    assert PrefixUse(memory, lookups=200, lookups_outside=51).off_task(0.25)


def test_an_entry_without_samples_leaves_a_query_with_nothing_before_it(tiny: CausalLM, states: Any, make_dictionary: Make) -> None:
    dictionary, tensors = make_dictionary(tiny, states, 40)
    for layer in (0, 2):
        tensors[tensor_name(layer, "log_z")] = np.full_like(tensors[tensor_name(layer, "log_z")], -np.inf)
    ids, at, kvs = torch.arange(8), torch.arange(40, 48), [tiny.new_kv(), tiny.new_kv()]
    got = tiny.forward(ids, at, [0, 8], [kvs[0]], prefixes=[PrefixUse(PrefixMemory(dictionary, tensors))])
    torch.testing.assert_close(got, tiny.forward(ids, at, [0, 8], [kvs[1]]), atol=1e-5, rtol=1e-5)


def test_the_graph_search_keeps_to_its_codebooks() -> None:
    pytest.importorskip("hnswlib", reason="hnswlib is not installed; the third index is not tested: pip install treadle-nn[hnsw]")
    keys = np.eye(8, dtype=np.float32)[None].repeat(2, 0)
    keys[1] = keys[1][::-1]
    index, cosine = GraphSearch(keys, None, seed=1).find(np.ascontiguousarray(keys[:1].repeat(2, 0)))
    assert index.tolist() == [list(range(8)), list(range(7, -1, -1))]
    np.testing.assert_allclose(cosine, 1.0)
