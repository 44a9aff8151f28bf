"""`treadle chat`: talk to the fabric from a terminal.

Owns the prompt, the commands behind a slash, the printing and Ctrl-C; the calls are in `conversation`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle.cli.conversation import Answer, Conversation, connect
from treadle.cli.gateway import ServedName, find_gateway, served_model, served_names
from treadle.cli.run_folder import RunFolder, home
from treadle.cli.terminal import EXIT_INTERRUPTED, print_error, print_json, stderr
from treadle.contract.errors import InvalidArgument, NotFound, TreadleError, Unavailable

TEMPERATURE = 0.2  # what the makers of the default model advise; at 1 a model of 135 M parameters rambles
ANSWER_TOKENS = 256  # a screen; a small model that has begun to repeat itself never ends by itself
HELP = (
    "/engram NAME answers with that memory (/engram none: without, /engram: says which), /models lists what there is, "
    "/new forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."
)
NO_MEMORY, DEFAULT_MEMORY = "none", "default"  # the gateway's words
VERSION_DIGITS_SHOWN = 12
_VERSION_PREFIX = re.compile(r"[0-9a-f]{8,64}")  # of it a gateway takes 8 digits or more


def chat(
    question: Annotated[str, typer.Argument(help="One question; none: a conversation.")] = "",
    url: Annotated[str, typer.Option(help="The gateway; none: the one that is up here.")] = "",
    model: Annotated[str, typer.Option(help="Model name; none: the first that the gateway serves.")] = "",
    engram: Annotated[
        str,
        typer.Option(
            help="Memory to answer with: NAME, NAME@VERSION, none or default; not given: what the model's name or the key says."
        ),
    ] = "",
    prefix: Annotated[str, typer.Option(help="Long prefix to answer behind: NAME or NAME@VERSION; not given: none.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = ANSWER_TOKENS,
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
        talk = Conversation(
            client, model or served_model(address, key), system, max_tokens, temperature, engram or None, prefix=prefix or None
        )
        if question:
            _one(talk, question, as_json)
        else:
            _converse(talk, address, key)


def _one(talk: Conversation, question: str, as_json: bool) -> None:
    answer = talk.ask(question, (lambda text: None) if as_json else _write)
    if as_json:
        print_json(
            {"model": talk.model, "engram": talk.engram, "prefix": talk.prefix, "answer": answer.text, "finish_reason": answer.finish_reason, "stopped": answer.stopped,
             "seconds_to_first": answer.seconds_to_first, "seconds": answer.seconds, "usage": answer.usage, "treadle": answer.memory}
        )  # fmt: skip
    else:
        _write("\n")
        _remark(answer)
    if answer.stopped:
        raise typer.Exit(EXIT_INTERRUPTED)
    if answer.broke_off:
        raise Unavailable("the answer broke off; `treadle logs` may say why")


def _converse(talk: Conversation, address: str, key: str | None) -> None:
    interactive = sys.stdin.isatty()
    if talk.engram:  # one question is answered or refused by the gateway at once, a conversation would begin in vain
        check_memory(talk.engram, served_names(address, key))
    talk.engram_option = "/engram"
    if interactive:
        with suppress(ImportError):  # some Pythons are built without
            importlib.import_module("readline")  # gives input() its line editing
        _tell(f"{talk.model} at {address}, {answering(talk, served_names(address, key))}. {HELP}")
    while (line := _next_line(interactive)) is not None:
        if line in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                _tell(_obeyed(talk, line, address, key))
            elif line:
                _turn(talk, line)
        except TreadleError as error:
            if not interactive:
                raise
            print_error(str(error))  # the next line may fare better


def _turn(talk: Conversation, line: str) -> None:
    answer = talk.ask(line, _write)
    _write("\n")
    _remark(answer)


def _obeyed(talk: Conversation, line: str, address: str, key: str | None) -> str:
    """Do what a line behind a slash says; what there is to say about it."""
    word, _, rest = line.partition(" ")
    if word == "/new":
        talk.forget()
        return "forgotten"
    if word == "/models":
        return "\n".join(_described(name) for name in served_names(address, key))
    if word != "/engram":
        return HELP
    names = served_names(address, key)
    if rest.strip():
        choose_memory(talk, rest.strip(), names)
    return answering(talk, names)


def choose_memory(talk: Conversation, text: str, names: Sequence[ServedName]) -> None:
    """Let `text` (NAME, NAME@VERSION, none or default) answer from now on; what was said before stays said.

    Raises as `check_memory` does; the one before then stays chosen.
    """
    check_memory(text, names)
    if talk.model.startswith(f"{names[0].id}+"):
        talk.model = names[0].id  # an alias chooses a memory, too, and must not contradict
    talk.engram = text


def check_memory(text: str, names: Sequence[ServedName]) -> None:
    """Whether `text` (NAME, NAME@VERSION, none or default) can answer, as far as `names` tells: not whether it has an older version.

    Raises NotFound, naming what is listed, for a memory that is not there, InvalidArgument for a version that is none.
    """
    there = [name.engram for name in names[1:] if name.engram]
    name, at, version = text.partition("@")
    if text not in (NO_MEMORY, DEFAULT_MEMORY) and name not in there:
        raise NotFound(
            f"there is no memory {name!r} here; there {'are' if len(there) > 1 else 'is'} {', '.join(there) or 'none to choose'}"
        )
    if at and not _VERSION_PREFIX.fullmatch(version.lower()):
        raise InvalidArgument(f"{text!r}: 8 to 64 hexadecimal digits from the beginning of the version belong behind the @")


def answering(talk: Conversation, names: Sequence[ServedName]) -> str:
    """Which memory answers now, in a few words."""
    base = names[0].id
    chosen = talk.engram or (talk.model.removeprefix(f"{base}+") if talk.model != base else names[0].engram)
    if chosen == DEFAULT_MEMORY:
        return "memory: the worker's default"
    if not chosen or chosen == NO_MEMORY:
        return "memory: none"
    name, _, version = chosen.partition("@")
    listed = next((each for each in names if each.engram == name), None)
    if listed is None or not listed.version or listed.version.startswith(version.lower()):
        return f"memory: {chosen}" + (_version(listed) if listed else "")
    now = listed.version[:VERSION_DIGITS_SHOWN]
    return f"memory: {chosen} (now current is {now}; the next question tells whether that version is still there)"


def _described(name: ServedName) -> str:
    return name.id + (f"  memory: {name.engram}{_version(name)}" if name.engram else "")


def _version(name: ServedName) -> str:
    return (
        f" (version {name.version[:VERSION_DIGITS_SHOWN]}{'' if name.open else ', opens when first used'})" if name.version else ""
    )


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
    for report in answer.memory.get("memory", ()):
        if report.get("kind") == "prefix":
            stderr().print(_prefix_remark(report), markup=False)
    if answer.finish_reason == "length":
        stderr().print("(cut off at the limit of tokens; --max-tokens sets it)")


def _prefix_remark(report: dict[str, Any]) -> str:
    """What a prefix did for the answer, in a few words."""
    if not report.get("prefix_tokens"):
        return f"(without the prefix {report['name']}: {report['missing_because']})"
    name = f"{report['name']}@{report['version'][:VERSION_DIGITS_SHOWN]}"
    how = "its exact KV, off its dictionary's task" if report.get("fell_back") else "its dictionary"
    off_task = ", which was not made for such a question" if report.get("missing_because") == "off_task" else ""
    return f"(behind {report['prefix_tokens']} tokens of {name}, by {how}{off_task})"


def _tell(text: str) -> None:
    stderr().print(text, soft_wrap=True, markup=False)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
