"""`treadle chat`: talk to the fabric from a terminal.

Owns the prompt, the printing and Ctrl-C; the calls are in `conversation`.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.conversation import Answer, Conversation, connect
from treadle.cli.gateway import find_gateway, served_model
from treadle.cli.run_folder import RunFolder, home
from treadle.cli.terminal import EXIT_INTERRUPTED, print_error, print_json, stderr
from treadle.contract.errors import InvalidArgument, TreadleError, Unavailable

TEMPERATURE = 0.2  # what the makers of the default model advise; at 1 a model of 135 M parameters rambles
HELP = "/new forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def chat(
    question: Annotated[str, typer.Argument(help="One question; none: a conversation.")] = "",
    url: Annotated[str, typer.Option(help="The gateway; none: the one that is up here.")] = "",
    model: Annotated[str, typer.Option(help="Model name; none: the first that the gateway serves.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = TEMPERATURE,
    api_key_file: Annotated[Path | None, typer.Option(help="File whose first key is shown to the gateway.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One question: print one JSON document.")] = False,
) -> None:
    """Ask the model, once or in a conversation; answers are streamed."""
    if as_json and not question:
        raise InvalidArgument("--json needs a question")
    address, key = find_gateway(RunFolder(home()), url, str(api_key_file or ""))
    client = connect(address, key)
    with client:
        talk = Conversation(client, model or served_model(address, key), system, max_tokens, temperature)
        if question:
            _one(talk, question, as_json)
        else:
            _converse(talk, address)


def _one(talk: Conversation, question: str, as_json: bool) -> None:
    answer = talk.ask(question, (lambda text: None) if as_json else _write)
    if as_json:
        print_json(
            {"model": talk.model, "answer": answer.text, "finish_reason": answer.finish_reason, "stopped": answer.stopped,
             "seconds_to_first": answer.seconds_to_first, "seconds": answer.seconds, "usage": answer.usage, "treadle": answer.memory}
        )  # fmt: skip
    else:
        _write("\n")
        _remark(answer)
    if answer.stopped:
        raise typer.Exit(EXIT_INTERRUPTED)
    if answer.broke_off:
        raise Unavailable("the answer broke off; `treadle logs` may say why")


def _converse(talk: Conversation, address: str) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # some Pythons are built without
            importlib.import_module("readline")  # gives input() its line editing
        stderr().print(f"{talk.model} at {address}. {HELP}", soft_wrap=True, markup=False)
    while (line := _next_line(interactive)) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            talk.forget()
        elif line.startswith("/"):
            stderr().print(HELP)
        elif line:
            _turn(talk, line, interactive)


def _turn(talk: Conversation, line: str, interactive: bool) -> None:
    try:
        answer = talk.ask(line, _write)
    except TreadleError as error:
        if not interactive:
            raise
        print_error(str(error))  # the next question may fare better
        return
    _write("\n")
    _remark(answer)


def _next_line(interactive: bool) -> str | None:
    """The next question, stripped; None at the end of the input. Ctrl-C at the prompt drops the line that was typed."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        if interactive:
            _write("\n")
        return None
    except KeyboardInterrupt:
        _write("\n")
        return ""


def _remark(answer: Answer) -> None:
    """What a reader has to know besides the text."""
    if answer.stopped:
        stderr().print("(stopped)")
    elif answer.broke_off:
        stderr().print("(broke off)")
    if answer.memory.get("degraded"):
        stderr().print("(made with memory missing)")
    if answer.finish_reason == "length":
        stderr().print("(cut off at the limit of tokens)")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
