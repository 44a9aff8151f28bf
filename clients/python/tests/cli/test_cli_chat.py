"""Conversations with a gateway that answers as OpenAI's does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from treadle.cli.chat import answering, choose_memory
from treadle.cli.conversation import HISTORY_MESSAGES_MAX, Conversation, connect
from treadle.cli.gateway import find_gateway, first_key, reachable_url, served_model, served_names
from treadle.cli.run_folder import RunFolder
from treadle.contract.errors import AccessDenied, InvalidArgument, NotFound, Unavailable


@pytest.fixture
def gateway(fakes: ModuleType) -> Iterator[str]:
    """URL of a fake gateway."""
    fakes.Gateway.seen.clear()
    fakes.Gateway.keys, fakes.Gateway.refusal = (), None
    server = ThreadingHTTPServer(("127.0.0.1", 0), fakes.Gateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def talk(gateway: str, fakes: ModuleType) -> Iterator[Conversation]:
    with connect(gateway, None) as client:
        yield Conversation(client, fakes.MODEL)


def ignore(text: str) -> None:
    """Nobody listens."""


def test_an_answer_comes_in_pieces_and_is_told_whole(talk: Conversation) -> None:
    pieces: list[str] = []
    answer = talk.ask("what is warp", pieces.append)
    assert pieces == ["what", " is", " warp", " indeed"]
    assert answer.text == "what is warp indeed"
    assert answer.finish_reason == "stop"
    assert answer.usage["completion_tokens"] == 4
    assert answer.memory == {"degraded": False}
    assert answer.seconds_to_first is not None
    assert 0 < answer.seconds_to_first <= answer.seconds
    assert not answer.stopped


def test_the_gateway_gets_what_was_said_before_up_to_a_limit(talk: Conversation, fakes: ModuleType) -> None:
    talk.system, talk.max_tokens, talk.temperature = "be brief", 7, 0.0
    for number in range(HISTORY_MESSAGES_MAX):
        talk.ask(f"question {number}", ignore)
    first, second, last = fakes.Gateway.seen[0], fakes.Gateway.seen[1], fakes.Gateway.seen[-1]
    assert (first["max_tokens"], first["temperature"], first["stream"]) == (7, 0.0, True)
    assert [message["content"] for message in second["messages"]] == ["be brief", "question 0", "question 0 indeed", "question 1"]
    assert len(last["messages"]) == HISTORY_MESSAGES_MAX + 2  # and the system prompt, and the question
    talk.forget()
    talk.ask("anew", ignore)
    assert [message["content"] for message in fakes.Gateway.seen[-1]["messages"]] == ["be brief", "anew"]


def test_ctrl_c_ends_the_answer_and_not_the_conversation(talk: Conversation) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    answer = talk.ask("tell me a long story", interrupt)
    assert answer.stopped
    assert answer.text == "tell"
    assert talk.ask("go on", ignore).text == "go on indeed"


def test_an_answer_that_breaks_off_has_no_finish_reason(talk: Conversation) -> None:
    assert talk.ask("break off", ignore).finish_reason is None


def test_refusals_are_told_in_our_words_and_leave_no_trace_in_the_history(talk: Conversation, fakes: ModuleType) -> None:
    model, talk.model = talk.model, "other"
    with pytest.raises(NotFound, match=r"^the model 'other' is not served here$"):
        talk.ask("hello", ignore)
    talk.model = model
    fakes.Gateway.keys = ("secret",)
    with pytest.raises(AccessDenied, match=r"^no such key$"):
        talk.ask("hello", ignore)
    fakes.Gateway.keys = ()
    talk.ask("at last", ignore)
    assert len(fakes.Gateway.seen[-1]["messages"]) == 1


def test_a_gateway_that_is_not_there_is_told_as_such(fakes: ModuleType) -> None:
    with connect("http://127.0.0.1:9", None) as client, pytest.raises(Unavailable, match="does not answer"):
        Conversation(client, fakes.MODEL).ask("hello", ignore)
    with pytest.raises(Unavailable, match="`treadle up` starts it"):
        served_model("http://127.0.0.1:9")


def test_the_gateway_is_the_one_given_or_the_default(tmp_path: Path) -> None:
    folder, keys = RunFolder(tmp_path), tmp_path / "keys"
    keys.write_text("\n# a comment\nfirst engram=kjv\nsecond\n")
    assert find_gateway(folder) == ("http://127.0.0.1:8000", None)
    assert find_gateway(folder, "http://there:1/v1/", str(keys)) == ("http://there:1", "first")
    with pytest.raises(NotFound, match="cannot be read"):
        first_key(str(tmp_path / "none"))


def test_a_key_to_show_is_never_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{'0' * 64}\nplain engram=kjv\n")
    assert first_key(str(keys)) == "plain"
    keys.write_text(f"sha256:{'0' * 64} tenant=team\n")
    with pytest.raises(NotFound, match="TREADLE_API_KEY"):
        first_key(str(keys))
    monkeypatch.setenv("TREADLE_API_KEY", "mine")
    assert first_key(str(keys)) == "mine"
    assert first_key("") == "mine"


def test_an_address_of_every_interface_is_reached_by_loopback() -> None:
    assert reachable_url("0.0.0.0:8000") == "http://127.0.0.1:8000"
    assert reachable_url("127.0.0.1:1") == "http://127.0.0.1:1"
    assert reachable_url("[::]:1") == "http://127.0.0.1:1"
    assert reachable_url("::1:8000") == reachable_url("[::1]:8000") == "http://[::1]:8000"


def test_one_question_prints_the_answer_and_what_one_has_to_know(cli: Any, gateway: str, fakes: ModuleType) -> None:
    run = cli("chat", "--url", gateway, "forget")
    assert run.stdout == "forget indeed\n"
    assert run.stderr == "(made with memory missing)\n"
    document = json.loads(cli("chat", "--url", gateway, "--json", "what is weft").stdout)
    assert document["answer"] == "what is weft indeed"
    assert document["model"] == fakes.MODEL


def test_questions_are_read_line_by_line(cli: Any, gateway: str, fakes: ModuleType) -> None:
    run = cli("chat", "--url", gateway, "--system", "be brief", stdin="one\n\n/help\n/new\ntwo\n/quit\nthree\n")
    assert run.stdout == "one indeed\ntwo indeed\n"
    assert "/new forgets" in run.stderr
    assert [len(body["messages"]) for body in fakes.Gateway.seen] == [2, 2]
    assert all("treadle" not in body for body in fakes.Gateway.seen)  # nothing was chosen


def test_a_question_is_asked_with_the_memory_that_was_named(cli: Any, gateway: str, fakes: ModuleType) -> None:
    document = json.loads(cli("chat", "--url", gateway, "--engram", "kjv", "--json", "who was Ruth").stdout)
    assert fakes.Gateway.seen[-1]["treadle"] == {"engram": "kjv"}
    assert document["engram"] == "kjv"
    assert document["treadle"]["memory"][0]["name"] == "kjv"
    refused = cli("chat", "--url", gateway, "--engram", "bible", "who was Ruth", code=1)
    assert refused.stderr == "error: --engram: there is no memory 'bible' here\n"


def test_a_conversation_changes_its_memory_and_says_which_answers(cli: Any, gateway: str, fakes: ModuleType) -> None:
    lines = "one\n/engram\n/engram kjv\ntwo\n/engram none\nthree\n/engram default\nfour\n/models\n"
    run = cli("chat", "--url", gateway, stdin=lines)
    assert run.stdout == "one indeed\ntwo indeed\nthree indeed\nfour indeed\n"
    assert run.stderr.splitlines() == [
        "memory: none", "memory: kjv (version 1b1b1b1b1b1b)", "memory: none", "memory: the worker's default",
        fakes.MODEL, f"{fakes.MODEL}+kjv  memory: kjv (version 1b1b1b1b1b1b)",
        f"{fakes.MODEL}+code  memory: code (version c0dec0dec0de, opens when first used)",
    ]  # fmt: skip
    chosen = [body.get("treadle", {}).get("engram") for body in fakes.Gateway.seen]
    assert chosen == [None, "kjv", "none", "default"]
    assert len(fakes.Gateway.seen[-1]["messages"]) == 7  # what was said before stays said


def test_a_memory_that_is_not_there_is_told_of_with_those_that_are(cli: Any, gateway: str, fakes: ModuleType) -> None:
    run = cli("chat", "--url", gateway, stdin="/engram bible\nhello\n", code=1)
    assert run.stderr == "error: there is no memory 'bible' here; there are kjv, code\n"
    run = cli("chat", "--url", gateway, "--engram", "bible", stdin="hello\n", code=1)  # before the first question
    assert run.stderr == "error: there is no memory 'bible' here; there are kjv, code\n"
    assert fakes.Gateway.seen == []


def test_a_version_is_checked_as_far_as_is_known_and_the_rest_by_the_next_question(cli: Any, gateway: str) -> None:
    run = cli("chat", "--url", gateway, stdin="/engram kjv@00000000\nhello\n", code=1)
    assert run.stderr.splitlines() == [
        "memory: kjv@00000000 (now current is 1b1b1b1b1b1b; the next question tells whether that version is still there)",
        f"error: /engram: 'kjv' has no version 00000000…; there is {'1b' * 32}",
    ]
    for wrong in ("kjv@", "kjv@1b", "kjv@weft-and-warp"):
        run = cli("chat", "--url", gateway, stdin=f"/engram {wrong}\n", code=1)
        assert f"'{wrong}': 8 to 64 hexadecimal digits" in run.stderr


def test_a_refusal_of_a_keys_memory_says_what_chooses_another_and_one_without_words_its_code(
    talk: Conversation, fakes: ModuleType
) -> None:
    reason = "the default memory of this key: there is no memory 'law' here"
    fakes.Gateway.refusal = {"error": {"message": reason, "param": "treadle.engram"}}
    with pytest.raises(InvalidArgument, match=f"^{reason}; --engram chooses another memory$"):
        talk.ask("hello", ignore)
    fakes.Gateway.refusal = {"detail": "from something in between"}
    with pytest.raises(InvalidArgument, match="the gateway answers 400 Bad Request"):
        talk.ask("hello", ignore)


def test_a_conversation_under_an_alias_goes_back_to_the_models_name_when_it_changes_its_memory(
    talk: Conversation, gateway: str
) -> None:
    names = served_names(gateway)
    talk.model = names[1].id
    assert answering(talk, names) == "memory: kjv (version 1b1b1b1b1b1b)"
    with pytest.raises(NotFound):
        choose_memory(talk, "bible", names)
    assert (talk.model, talk.engram) == (names[1].id, None)
    choose_memory(talk, "code@c0dec0de", names)
    assert [talk.model, talk.engram] == [names[0].id, "code@c0dec0de"]
    assert answering(talk, names) == "memory: code@c0dec0de (version c0dec0dec0de, opens when first used)"


def test_errors_end_with_code_one_and_a_line(cli: Any, gateway: str) -> None:
    refused = cli("chat", "--url", gateway, "--model", "other", "hello", code=1)
    assert refused.stderr == "error: the model 'other' is not served here\n"
    assert "broke off" in cli("chat", "--url", gateway, "break off", code=1).stderr
