"""`treadle asm build`: a long prefix to a dictionary's folder. Options and a bar; the work is `asm_store.building`'s."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from asm_store.commands import build_options as given
from asm_store.commands.building import CORES, Chat, Threads, load_builder, model_at, say, working, wrap_for
from asm_store.commands.calling import Json
from asm_store.commands.show import print_card
from asm_store.commands.terminal import VERSION_DIGITS, print_json, print_line
from treadle.contract.dictionary import DictionarySettings, Positions
from treadle.contract.errors import InvalidArgument

if TYPE_CHECKING:
    from asm_store.building.build import Order
    from asm_store.building.recipe import Recipe
    from treadle.contract.dictionary import Dictionary

DEFAULTS = DictionarySettings()
RIDGE_PPM = 10_000  # of a whitening: 1 % of the mean variance


def build(
    name: given.Name,
    prefix: given.Prefix,
    traces: given.Traces = None,
    self_traces: given.SelfTraces = None,
    chat: Chat = False,
    model: given.Model = "smollm2-135m",
    out: given.Out = None,
    entries: given.Entries = DEFAULTS.entries,
    key: given.Key = DEFAULTS.key,
    key_position: given.KeyPosition = DEFAULTS.key_position,
    whiten: given.Whiten = False,
    heads_joined: given.HeadsJoined = DEFAULTS.heads_joined,
    grouping: given.Grouping = DEFAULTS.grouping,
    aggregation: given.Aggregation = DEFAULTS.aggregation,
    chunk_tokens: given.ChunkTokens = 0,
    chunk_merge: given.ChunkMerge = DEFAULTS.chunk_merge,
    positions: given.Positions = DEFAULTS.positions,
    dtype: given.Dtype = DEFAULTS.dtype,
    lists: given.Lists = DEFAULTS.lists,
    layers: given.Layers = "",
    matched_keys: given.MatchedKeys = None,
    iterations: given.Iterations = DEFAULTS.iterations,
    seed: given.Seed = DEFAULTS.seed,
    keep_prefix_kv: given.KeepPrefixKV = False,
    extend_from: given.ExtendFrom = None,
    source: given.Source = "",
    restart: given.Restart = False,
    threads: Threads = CORES,
    as_json: Json = False,
) -> None:
    """Build a dictionary: a forward pass over traces behind the prefix, then clustering. Interrupted, the same command goes on."""
    if traces is not None and self_traces is not None:
        raise InvalidArgument("--traces and --self-traces: one of them")
    if chat and traces is None:
        raise InvalidArgument("--chat: writes the prompts of --traces; the model's own traces have their forms already")
    load_builder(threads)
    from asm_store.building.recipe import Recipe

    settings = DictionarySettings(
        key, key_position, RIDGE_PPM if whiten else 0, heads_joined, grouping, aggregation, chunk_merge, positions, dtype, entries, lists,
        iterations, seed,
    )  # fmt: skip
    recipe = Recipe(
        name, settings, _numbers(layers), chunk_tokens, self_traces=0 if traces is not None else self_traces or given.SELF_TRACES,
        keep_prefix_kv=keep_prefix_kv,
    )  # fmt: skip
    if extend_from is not None:
        recipe = _as_base(recipe, extend_from)
    order = _order(recipe, model, prefix, traces, chat, (out or Path(name)).absolute(), extend_from, source)
    if extend_from is None:
        order = _with_matched_keys(order, matched_keys)
    _tell(order.out, *_carry_out(order, restart), as_json)


def _as_base(recipe: Recipe, base: Path) -> Recipe:
    """A further chunk has its base's settings: options that shape entries are not looked at."""
    from treadle.contract.dictionary_file import read_manifest

    dictionary = read_manifest(base)
    return replace(recipe, settings=dictionary.settings, layers=dictionary.layers, keep_prefix_kv=False)


def _with_matched_keys(order: Order, count: int | None) -> Order:
    """The order with as many matched keys as were asked for, or as many as do well."""
    from asm_store.building.recipe import matched_keys_of

    settings = order.recipe.settings
    if count is None:
        count = matched_keys_of(len(order.prefix)) if settings.positions is Positions.AFTER_PREFIX else 0
    return replace(order, recipe=replace(order.recipe, settings=replace(settings, matched_keys=count)))


def _order(
    recipe: Recipe, model: str, prefix: list[Path], traces: Path | None, chat: bool, out: Path, base: Path | None, source: str
) -> Order:
    from asm_store.building.build import Order
    from asm_store.building.prefix import load_tokenizer, prefix_tokens, read_text
    from asm_store.building.traces import read_traces

    folder, model_name = model_at(model)
    tokenizer = load_tokenizer(folder)
    read = () if traces is None else read_traces(traces, tokenizer, wrap_for(folder, chat))
    ids = prefix_tokens(tokenizer, [read_text(path) for path in prefix], begins=base is None)
    return Order(recipe, folder, model_name, ids, read, out, base, source)


def _carry_out(order: Order, restart: bool) -> tuple[Dictionary, dict[str, object]]:
    from asm_store.building.build import Build

    try:
        with working() as watch:
            return Build(order, watch, restart=restart).run()
    except KeyboardInterrupt:
        say(f"interrupted; what is done is kept in {order.out}: the same command goes on, with --restart it begins again")
        raise typer.Exit(130) from None


def _tell(out: Path, dictionary: Dictionary, card: dict[str, object], as_json: bool) -> None:
    if as_json:
        print_json(card)
        return
    print_card(dictionary, card)
    print_line(f"\n{out} holds {dictionary.name} {dictionary.version[:VERSION_DIGITS]}. To serve it:  treadle asm publish {out}")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidArgument(f"--layers: numbers such as 0,4,8 expected, got {text!r}") from None
