"""`treadle asm eval`: a file of questions answered with the full prefix, with the dictionary and without either."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asm_store.building.card import read_card
from asm_store.building.card_reading import CardRead
from asm_store.commands.building import CORES, Chat, Threads, load_builder, model_at, working, wrap_for
from asm_store.commands.calling import Json
from asm_store.commands.terminal import print_json, print_table
from treadle.contract.errors import InvalidArgument

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from asm_store.building.evaluation import Answers
    from treadle.contract.dictionary import Dictionary
    from treadle.nn.kv import SequenceKV
    from treadle.nn.model import CausalLM


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Folder of a dictionary.", show_default=False)],
    questions: Annotated[Path, typer.Option(help='JSON lines {"prompt", "choices"?, "answer"?}.', show_default=False)],
    prefix: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text files of the prefix, as they were built from, of all its parts in order; needed where its KV was not kept.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Model folder or name; default: the one that the card names.")] = "",
    chat: Chat = False,
    threads: Threads = CORES,
    as_json: Json = False,
) -> None:
    """Agreement and KL of the dictionary's answers with the full prefix's, and what share of them is right."""
    load_builder(threads)
    from asm_store.building.base import Base
    from asm_store.building.evaluation import ask, read_questions
    from asm_store.building.prefix import load_tokenizer
    from asm_store.building.stepping import Before
    from treadle.nn.model import CausalLM
    from treadle.nn.model_identity import dictionary_model

    opened = Base.open(folder)
    opened.dictionary.require_whole()
    named = model or CardRead.of(read_card(folder), ()).model
    if not named:
        raise InvalidArgument(f"{folder}: its card names no model; say which with --model")
    model_folder, _ = model_at(named)
    tokenizer, loaded = load_tokenizer(model_folder), CausalLM.load(model_folder)
    opened.dictionary.model.fingerprint.require(dictionary_model(model_folder, loaded.config).fingerprint.as_dict())
    asked = read_questions(questions, tokenizer, wrap_for(model_folder, chat))
    with working() as watch:
        kv = _exact_kv(folder, opened.dictionary, loaded, tokenizer, prefix or [])
        others = {"dictionary": Before.dictionary(opened.memory), "nothing": Before()}
        answers = ask(loaded, Before(kv.length, shared=kv), others, asked, lambda done: watch("asking", done, len(asked)))
    if as_json:
        print_json({name: of.to_json() for name, of in answers.items()})
    else:
        print_table(("with", "questions", "agreement", "KL, nats", "accuracy", "answer, nats a token"), _lines(answers), empty="")


def _exact_kv(folder: Path, dictionary: Dictionary, model: CausalLM, tokenizer: Tokenizer, prefix: list[Path]) -> SequenceKV:
    from asm_store.building.prefix import read_text, tokens_of_parts
    from asm_store.building.prefix_kv import read_prefix_kv
    from asm_store.building.stepping import encode

    if not prefix:
        return read_prefix_kv(folder, dictionary, model)
    made_of = dictionary.prefix.parts or (dictionary.prefix.digest,)
    try:
        tokens = tokens_of_parts(tokenizer, [read_text(path) for path in prefix], made_of)
    except InvalidArgument as error:
        raise InvalidArgument(f"--prefix: {error}") from error
    return encode(model, tokens, (len(tokens),))


def _lines(answers: dict[str, Answers]) -> list[tuple[str, ...]]:
    return [
        (
            name, f"{of.questions:,}", f"{of.agreement:.3f}", f"{of.kl:.4f}", "" if of.accuracy is None else f"{of.accuracy:.3f}",
            "" if of.answer_nats is None else f"{of.answer_nats:.3f}",
        )
        for name, of in answers.items()
    ]  # fmt: skip
