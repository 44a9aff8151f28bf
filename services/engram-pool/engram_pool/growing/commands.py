"""`treadle engram`: grow a memory from text, read its card, measure it, compare memories.

Owns words, options and bars; the work is `growth`'s and `evaluation`'s. Torch is imported when a command needs it, after its
threads are set. Errors are TreadleError: the `treadle` command prints them and exits with 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram_pool.growing import terminal
from engram_pool.growing.card import read_card
from engram_pool.terminal import print_json, print_line
from treadle.contract.errors import InvalidArgument, NotFound
from treadle.contract.version import check_name

if TYPE_CHECKING:
    from engram_pool.growing.corpus import Corpus, Text
    from engram_pool.growing.growth import Order

app = typer.Typer(no_args_is_help=True, help="Grow a memory for a model from your own text, and measure it.")
DEFAULT_MODEL = "smollm2-135m"
SHIPPED_MIX = Path(__file__).parents[1] / "shipped" / "mix.txt.xz"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Model = Annotated[str, typer.Option(help="A model folder (Hugging Face layout), or a name to fetch.")]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads; default: all cores. Other threads, other last digits.")]
Texts = Annotated[
    list[Path],
    typer.Option(
        "--text",
        help="Text files, UTF-8, also .xz: --text a.txt --text b.txt, or with `grow` also --text a.txt b.txt.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N: where the model runs and the memory learns.")]
Memory = Annotated[Path, typer.Argument(help="Folder of a grown memory.", show_default=False)]
Precision = Annotated[str, typer.Option(help="Rows as bf16, fp8 or int4; fp8 and int4 with one scale a row.")]
CORES = len(os.sched_getaffinity(0))


@app.command()
def grow(
    text: Texts,
    more: Annotated[list[Path] | None, typer.Argument(help="More text files, behind --text.", show_default=False)] = None,
    *,
    name: Annotated[str, typer.Option(help="Name of the memory; requests choose it by this.", show_default=False)],
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: the name, here.")] = None,
    precision: Precision = "int4",
    mix: Annotated[
        list[Path] | None, typer.Option(help="Other text that keeps the rest of the language in place; default: one that ships.")
    ] = None,
    no_mix: Annotated[bool, typer.Option("--no-mix", help="Learn from the text alone.")] = False,
    held_out: Annotated[
        list[Path] | None, typer.Option("--held-out", help="Text to measure on; default: each 15th passage of --text.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to learn from; 0: all.")] = 0,
    layers: Annotated[str, typer.Option(help="0-based decoder layers that get an Engram.")] = "1,14",
    orders: Annotated[str, typer.Option(help="n-gram orders.")] = "2,3",
    heads: Annotated[int, typer.Option(min=1, help="Heads of each order.")] = 8,
    dim: Annotated[int, typer.Option(min=2, help="Values of a row.")] = 32,
    prime_base: Annotated[int, typer.Option(min=2, help="Smallest number of rows of a head.")] = 10_007,
    passes: Annotated[int, typer.Option(min=1, help="Passes over the text; more than one ruins what was not learnt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of block order and random starts.")] = 0,
    source: Annotated[str, typer.Option(help="Where the text comes from and its licence, for the card.")] = "",
    restart: Annotated[bool, typer.Option("--restart", help="Begin again where an interrupted run left a checkpoint.")] = False,
    threads: Threads = CORES,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Grow a memory: the model stays frozen, rows and their projections learn. Interrupted, the same command goes on."""
    check_name(name)
    if no_mix and mix:
        raise InvalidArgument("--mix and --no-mix: one of them")
    _set_threads(threads)
    from engram_pool.growing.growth import Order
    from engram_pool.growing.recipe import MIX_EVERY, Recipe

    recipe = Recipe(
        layers=_numbers("layers", layers), orders=_numbers("orders", orders), heads=heads, dim=dim, prime_base=prime_base,
        tokens_max=tokens, passes=passes, seed=seed, mix_every=0 if no_mix else MIX_EVERY,
    )  # fmt: skip
    model_folder, model_name = _model(model)
    mixed = mix or [SHIPPED_MIX]
    corpus = _corpus(model_folder, recipe.block_tokens, [*text, *(more or [])], held_out or [], mixed, learn_mix=not no_mix)
    order = Order(
        name, model_folder, model_name, (out or Path(name)).absolute(), precision, recipe, corpus,
        () if no_mix else tuple(path.name for path in mixed), source,
    )  # fmt: skip
    _carry_out(order, restart, device, as_json)


@app.command()
def add(
    memory: Memory,
    text: Texts,
    out: Annotated[Path, typer.Option(help="Folder to write.", show_default=False)],
    name: Annotated[str, typer.Option(help="Name of the new memory; default: the old one's, as a new version.")] = "",
    model: Model = DEFAULT_MODEL,
    held_out: Annotated[
        list[Path] | None, typer.Option("--held-out", help="Text to measure on; default: each 15th passage of --text.")
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="Passes over the text; rows alone bear several.")] = 1,
    precision: Annotated[str, typer.Option(help="bf16, fp8 or int4; default: the memory's own.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of block order.")] = 0,
    source: Annotated[str, typer.Option(help="Where the text comes from and its licence, for the card.")] = "",
    restart: Annotated[bool, typer.Option("--restart", help="Begin again where an interrupted run left a checkpoint.")] = False,
    threads: Threads = CORES,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Add a text to a memory as a new version: only rows learn, so what it does elsewhere stays."""
    _set_threads(threads)
    from engram_pool.growing import folder
    from engram_pool.growing.growth import Order, rows_only
    from engram_pool.growing.recipe import Recipe

    parent, card = folder.read(memory).model, read_card(memory)
    recipe = rows_only(Recipe(seed=seed), parent, passes=passes)
    model_folder, model_name = _model(model)
    corpus = _corpus(model_folder, recipe.block_tokens, text, held_out or [], [SHIPPED_MIX], learn_mix=False)
    order = Order(
        name or parent.name, model_folder, model_name, out.absolute(), precision or str(card["precision"]), recipe, corpus,
        source=source, parent=memory,
    )  # fmt: skip
    _carry_out(order, restart, device, as_json)


@app.command()
def card(memory: Memory, as_json: Json = False) -> None:
    """Show what a memory was grown from, and what it does to perplexity."""
    document = read_card(memory)
    if as_json:
        print_json(document)
    else:
        terminal.print_card(document)


@app.command("eval")
def evaluate(
    memory: Memory, text: Texts, model: Model = DEFAULT_MODEL, threads: Threads = CORES,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of 512 tokens to measure on, spread over the text.")] = 40,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Perplexity of a text without the memory, with it, and with its rows shuffled."""
    _set_threads(threads)
    from engram_pool.growing import folder
    from engram_pool.growing.comparison import measure
    from engram_pool.growing.evaluation import shuffled

    grown = folder.read(memory)
    states = {"without": None, grown.model.name: grown.memory, f"{grown.model.name}, rows shuffled": shuffled(grown.memory)}
    _report(measure, states, text, model, blocks, as_json)


@app.command()
def compare(
    memories: Annotated[list[Path], typer.Argument(help="Folders of grown memories.", show_default=False)],
    text: Texts, model: Model = DEFAULT_MODEL, threads: Threads = CORES,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of 512 tokens to measure on, spread over the text.")] = 40,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Perplexity of a text with each of several memories, with 95 % intervals of their ratios to none."""
    _set_threads(threads)
    from engram_pool.growing import folder
    from engram_pool.growing.comparison import measure

    states: dict[str, Any] = {"without": None}
    for path in memories:
        grown = folder.read(path)
        states[f"{grown.model.name} {grown.model.version[:12]}"] = grown.memory
    _report(measure, states, text, model, blocks, as_json)


def _report(measure: Any, states: dict[str, Any], text: list[Path], model: str, blocks: int, as_json: bool) -> None:
    model_folder, _ = _model(model)
    texts = _tokenise(model_folder, text)
    with terminal.measuring() as tick:
        lines = measure(model_folder, states, texts, blocks, tick)
    if as_json:
        print_json(lines)
    else:
        terminal.print_comparison(lines)


def _carry_out(order: Order, restart: bool, device: str, as_json: bool) -> None:
    from engram_pool.growing.growth import Growth

    growth = Growth(order, terminal.say, device=device)
    if restart:
        growth.restart()
    with terminal.growing(order.name) as watch:
        growth.train(watch)
    with terminal.measuring() as tick:
        model, document = growth.finish(tick)
    if as_json:
        print_json(document)
        return
    terminal.print_card(document)
    print_line(f"\n{order.out} holds {model.name} {model.version[:12]}. To serve it:  treadle pool load --grown {order.out}")
    print_line(f"then ask for the model {order.model_name}+{model.name}, or:  treadle chat --engram {model.name}")


def _corpus(model_folder: Path, length: int, text: list[Path], held_out: list[Path], mix: list[Path], *, learn_mix: bool) -> Corpus:
    from engram_pool.growing.corpus import corpus_of

    return corpus_of(
        _tokenise(model_folder, text),
        length,
        held_out=_tokenise(model_folder, held_out),
        mix=_tokenise(model_folder, mix),
        learn_mix=learn_mix,
    )


def _tokenise(model_folder: Path, paths: list[Path]) -> list[Text]:
    from engram_pool.growing.corpus import read_text, tokenise

    return tokenise(model_folder / "tokenizer.json", [(path.name, read_text(path)) for path in paths])


def _model(model: str) -> tuple[Path, str]:
    from treadle.nn.model_folder import find_model_folder

    return find_model_folder(model, terminal.fetching)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(" ", ",").split(",") if part)
    except ValueError:
        raise InvalidArgument(f"--{option}: numbers such as 1,14 expected, got {text!r}") from None


def _set_threads(threads: int) -> None:
    from treadle.chassis.threads import set_compute_threads

    if "torch" in sys.modules:  # the caller's process has it already, with waiting threads as they are
        import torch

        torch.set_num_threads(threads)
        return
    set_compute_threads(threads)
    _require_grower()


def _require_grower() -> None:
    try:
        import torch  # noqa: F401

        import treadle.nn  # noqa: F401
    except ImportError as error:
        raise NotFound("growing needs torch and treadle-nn: pip install 'treadle-engram-pool[grower]'") from error
