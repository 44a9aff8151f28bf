"""Lookup keys: which heads stand where, which form of the query they hold, and what whitening does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.contract.dictionary import Dictionary, DictionaryModel, DictionarySettings, Grouping, KeyMode
from treadle.contract.errors import InvalidArgument
from treadle.nn.lookup_keys import join_heads, lookup_keys, whitening_of
from treadle.nn.model import CausalLM
from treadle.nn.rope import rotate

DIGEST = "0" * 64
GROUPS = [(9, 3, 1), (9, 3, 3), (8, 2, 1), (8, 2, 2), (8, 2, 4), (4, 4, 1), (4, 1, 2)]  # heads, kv_heads, c


def drawn(rows: int, heads: int, dim: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed))


def order_of_heads(settings: DictionarySettings, model: DictionaryModel) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """What a manifest with those settings says; it has no tensors here, so that there is no Dictionary yet."""
    declared: Any = Dictionary.heads_of_lookups
    bare = SimpleNamespace(settings=settings, model=model, lookups=model.group // settings.heads_joined)
    order: tuple[tuple[tuple[int, ...], ...], ...] = declared.fget(bare)
    return order


@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize(("heads", "kv_heads", "joined"), GROUPS)
def test_heads_are_joined_in_the_order_that_the_manifest_says(heads: int, kv_heads: int, joined: int, grouping: Grouping) -> None:
    settings = DictionarySettings(heads_joined=joined, grouping=grouping)
    model = DictionaryModel(DIGEST, DIGEST, DIGEST, layers=1, heads=heads, kv_heads=kv_heads, head_dim=16)
    values, order = drawn(5, heads), order_of_heads(settings, model)
    got = join_heads(values, settings, model)
    for book, lookups in enumerate(order):
        for place, members in enumerate(lookups):
            assert torch.equal(got[:, book, place], values[:, list(members)])
    assert torch.equal(join_heads(values[..., 0], settings, model), got[..., 0])
    keys = lookup_keys(values, values, None, settings, model)
    assert keys.shape == (5, len(order), len(order[0]), len(order[0][0]) * 16)
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(keys.shape[:3]))
    torch.testing.assert_close(keys, torch.nn.functional.normalize(got.flatten(3), dim=-1))


def test_the_mode_says_which_form_of_the_query_a_key_holds(tiny: CausalLM) -> None:
    queries, positions = drawn(6, tiny.config.heads), torch.arange(40, 46)
    rotated = rotate(queries, tiny.rope.angles(positions))

    def keys(mode: KeyMode, position: int = 0) -> Tensor:
        settings = DictionarySettings(key=mode, key_position=position, heads_joined=2)
        return lookup_keys(queries, rotated, tiny.rope, settings, tiny.config)

    def unit(form: Tensor) -> Tensor:
        return torch.nn.functional.normalize(join_heads(form, DictionarySettings(heads_joined=2), tiny.config).flatten(3), dim=-1)

    torch.testing.assert_close(keys(KeyMode.PRE_ROPE), unit(queries))
    torch.testing.assert_close(keys(KeyMode.OWN_POSITION), unit(rotated))
    torch.testing.assert_close(keys(KeyMode.ROPE_UNIFIED, 44)[4], unit(rotated)[4], atol=1e-6, rtol=1e-5)
    with pytest.raises(InvalidArgument, match="rope"):
        lookup_keys(queries, rotated, None, DictionarySettings(key=KeyMode.ROPE_UNIFIED), tiny.config)


@pytest.mark.parametrize("ridge_ppm", [0, 1000])
def test_one_rotation_for_all_queries_leaves_every_cosine_as_it_was(tiny: CausalLM, ridge_ppm: int) -> None:
    """So rope-unified keys find what pre-rope keys find, whitened or not: docs/decisions/0033."""
    queries = drawn(300, tiny.config.heads) * torch.linspace(0.1, 4.0, 16)
    rotated = rotate(queries, tiny.rope.angles(torch.full((300,), 77)))

    def cosines(mode: KeyMode, form: Tensor) -> Tensor:
        settings = DictionarySettings(key=mode, key_position=77, ridge_ppm=ridge_ppm)
        whitening = whitening_of(form, ridge_ppm) if ridge_ppm else None
        keys = lookup_keys(queries, queries, tiny.rope, settings, tiny.config, whitening)[:, 0, 0]
        return keys @ keys.T

    torch.testing.assert_close(cosines(KeyMode.PRE_ROPE, queries), cosines(KeyMode.ROPE_UNIFIED, rotated), atol=2e-5, rtol=0)


def test_whitening_gives_every_direction_of_each_head_the_same_weight() -> None:
    mixing = torch.linalg.qr(drawn(16, 1, seed=3)[:, 0]).Q * torch.linspace(0.3, 3.0, 16)
    queries = torch.stack((drawn(4000, 1)[:, 0] @ mixing, drawn(4000, 1, seed=1)[:, 0] + 2.0), dim=1)
    whitening = whitening_of(queries, ridge_ppm=1)
    torch.testing.assert_close(whitening, whitening.transpose(1, 2))
    white = torch.einsum("hde,the->thd", whitening, queries)
    second_moment = torch.einsum("thd,the->hde", white, white) / len(white)
    torch.testing.assert_close(second_moment, torch.eye(16).expand(2, 16, 16), atol=2e-3, rtol=0)


def test_a_ridge_bounds_what_whitening_does_with_fewer_queries_than_directions() -> None:
    whitening = whitening_of(drawn(3, 2), ridge_ppm=10_000)
    assert whitening.isfinite().all()
    assert whitening.abs().max() < 20  # 1 / sqrt of a hundredth of the mean diagonal, about 1


def test_what_does_not_fit_is_refused() -> None:
    queries, model = drawn(4, 4), DictionaryModel(DIGEST, DIGEST, DIGEST, layers=1, heads=4, kv_heads=2, head_dim=16)
    with pytest.raises(InvalidArgument, match="heads_joined"):
        lookup_keys(queries, queries, None, DictionarySettings(heads_joined=3), model)
    with pytest.raises(InvalidArgument, match="whitening"):
        lookup_keys(queries, queries, None, DictionarySettings(ridge_ppm=5), model)
    with pytest.raises(InvalidArgument, match="whitening"):
        lookup_keys(queries, queries, None, DictionarySettings(), model, whitening_of(queries, 5))
    for bad, ridge in ((queries, 0), (queries[:0], 5), (torch.zeros(4, 4, 16), 5), (queries * torch.nan, 5)):
        with pytest.raises(InvalidArgument, match="whitening"):
            whitening_of(bad, ridge)
