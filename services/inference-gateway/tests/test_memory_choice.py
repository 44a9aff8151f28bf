"""A request chooses its memory at the door: by field, by the model's name, or by its key."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from inference_gateway.__main__ import serve
from inference_gateway.settings import Settings
from treadle.chassis.settings import WrongSetting
from treadle.inference.v1 import worker_pb2

MODEL = "tiny-chat"
HI = [{"role": "user", "content": "hi"}]
KJV_VERSION = "1b" * 32


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        time.sleep(0.01)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def chosen_of(worker: Any) -> tuple[str, str] | None:
    """Name and version that the last request asked the worker for; None: left to the worker."""
    request = worker.requests[-1]
    return (request.engram.model, request.engram.version) if request.HasField("engram") else None


def ask(gateway: Any, model: str = MODEL, engram: str | None = None, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": HI, "treadle": {"engram": engram}, **more}
    answer: httpx.Response = gateway.http.post("/v1/chat/completions", json=body)
    return answer


@pytest.mark.parametrize(
    ("model", "engram", "chosen", "by", "used"),
    [
        (MODEL, None, None, "default", "some"),
        (MODEL, "default", None, "field", "some"),
        (MODEL, "none", ("", ""), "field", "none"),
        (MODEL, "kjv", ("kjv", ""), "field", "some"),
        (MODEL, "kjv@1B1B1B1B", ("kjv", "1b1b1b1b"), "field", "some"),
        (f"{MODEL}+kjv", None, ("kjv", ""), "alias", "some"),
        (f"{MODEL}+kjv@1b1b1b1b", None, ("kjv", "1b1b1b1b"), "alias", "some"),
        (f"{MODEL}+none", None, ("", ""), "alias", "none"),
        (f"{MODEL}+default", None, None, "alias", "some"),
        (f"{MODEL}+kjv", "kjv", ("kjv", ""), "field", "some"),
        (f"{MODEL}+kjv", "kjv@1b1b1b1b", ("kjv", "1b1b1b1b"), "field", "some"),
    ],
)
def test_the_worker_is_asked_for_what_the_request_chose(
    gateway: Any, worker: Any, model: str, engram: str | None, chosen: tuple[str, str] | None, by: str, used: str
) -> None:
    name = "treadle_gateway_memory_choices_total"
    before = gateway.figure(name, by=by, memory=used)
    answer = ask(gateway, model, engram)
    assert answer.status_code == 200, answer.text
    assert chosen_of(worker) == chosen
    assert answer.json()["model"] == model  # as it was asked for
    reported = [memory["name"] for memory in answer.json()["treadle"]["memory"]]
    assert reported == ([] if used == "none" else [chosen[0] if chosen else "smollm2-demo"])
    assert gateway.figure(name, by=by, memory=used) == before + 1


def test_streams_and_completions_choose_and_name_their_model_in_the_same_way(gateway: Any, worker: Any) -> None:
    body = {"model": f"{MODEL}+kjv", "prompt": "In the beginning"}
    answer = gateway.http.post("/v1/completions", json=body).json()
    assert (answer["model"], chosen_of(worker)) == (f"{MODEL}+kjv", ("kjv", ""))
    text = ask(gateway, f"{MODEL}+code", stream=True).text
    assert f'"model":"{MODEL}+code"' in text
    assert f'"model":"{MODEL}"' not in text
    assert chosen_of(worker) == ("code", "")


@pytest.mark.parametrize(
    ("model", "engram"),
    [(f"{MODEL}+kjv", "code"), (f"{MODEL}+kjv", "none"), (f"{MODEL}+none", "kjv"), (f"{MODEL}+kjv@1b1b1b1b", "kjv@ffffffff")],
)
def test_field_and_name_that_choose_differently_are_refused(gateway: Any, worker: Any, model: str, engram: str) -> None:
    error = error_of(ask(gateway, model, engram), 400)
    assert (error["param"], error["code"]) == ("treadle.engram", "engram_conflict")
    assert worker.requests == []


def test_an_unknown_memory_is_refused_by_how_it_was_chosen_and_the_others_are_named(gateway: Any) -> None:
    by_field, by_alias = error_of(ask(gateway, engram="bible"), 400), error_of(ask(gateway, f"{MODEL}+bible"), 404)
    assert (by_field["param"], by_field["code"]) == ("treadle.engram", "engram_not_found")
    assert (by_alias["param"], by_alias["code"]) == ("model", "model_not_found")
    for error in (by_field, by_alias):
        assert error["message"].endswith("there is no memory 'bible' here; there are 'code', 'kjv', 'smollm2-demo'")


def test_a_memory_that_does_not_fit_says_why(gateway: Any) -> None:
    assert "made for another tokenizer" in error_of(ask(gateway, engram="foreign"), 400)["message"]
    assert "made for another tokenizer" in error_of(ask(gateway, f"{MODEL}+foreign"), 404)["message"]


def test_an_alias_of_another_model_or_of_no_form_is_not_found(gateway: Any) -> None:
    for model in ("another+kjv", f"{MODEL}+", f"{MODEL}+kjv@1b"):
        assert error_of(ask(gateway, model), 404)["code"] == "model_not_found"


def test_a_memory_that_is_loaded_while_all_runs_can_be_chosen_at_once(gateway: Any, worker: Any) -> None:
    error_of(ask(gateway, f"{MODEL}+fresh"), 404)
    worker.status["engram_models"] = [
        *worker.status["engram_models"],
        worker_pb2.EngramModelStatus(model="fresh", version="0" * 64),
    ]
    assert ask(gateway, f"{MODEL}+fresh").status_code == 200
    wait_until(lambda: f"{MODEL}+fresh" in [model["id"] for model in gateway.http.get("/v1/models").json()["data"]], "it is listed")


@pytest.mark.parametrize(
    ("code", "trailing"),
    [
        (grpc.StatusCode.NOT_FOUND, ()),
        (grpc.StatusCode.FAILED_PRECONDITION, (("treadle-field", "token_map"),)),
        (grpc.StatusCode.FAILED_PRECONDITION, ()),
    ],
)
def test_a_memory_that_the_worker_refuses_is_refused_as_if_it_had_been_known(
    gateway: Any, worker: Any, scripts: Any, code: grpc.StatusCode, trailing: tuple[tuple[str, str], ...]
) -> None:
    worker.script = scripts["refuse_with"](code, "no version of kjv begins with 99999999", *trailing)
    for stream in (False, True):
        by_field = error_of(ask(gateway, engram="kjv@99999999", stream=stream), 400)
        by_alias = error_of(ask(gateway, f"{MODEL}+kjv@99999999", stream=stream), 404)
        assert (by_field["param"], by_field["code"]) == ("treadle.engram", "engram_not_found")
        assert (by_alias["param"], by_alias["code"]) == ("model", "model_not_found")
        assert all("no version of kjv begins with 99999999" in error["message"] for error in (by_field, by_alias))
    assert error_of(ask(gateway), 502)["code"] == "worker_failed"  # nothing was chosen: this is no fault of the request


def test_a_memory_that_is_damaged_is_named_with_the_reason_and_is_no_fault_of_the_request(
    gateway: Any, worker: Any, scripts: Any
) -> None:
    told = "engram memory 'kjv', version 1b1b, is damaged: fusion weights: wrong digest"
    worker.script = scripts["refuse_with"](grpc.StatusCode.DATA_LOSS, told)
    for stream in (False, True):
        for model, engram, param in ((MODEL, "kjv", "treadle.engram"), (f"{MODEL}+kjv", None, "model")):
            error = error_of(ask(gateway, model, engram, stream=stream), 502)
            assert (error["param"], error["code"], error["type"]) == (param, "engram_damaged", "server_error")
            assert told in error["message"]


def test_while_the_pool_has_not_answered_the_worker_memories_are_not_called_missing(
    gateway: Any, worker: Any, scripts: Any
) -> None:
    reason = "the engram pool at 127.0.0.1:7401 has not answered yet: connection refused"
    worker.status["engram_models"] = [
        worker_pb2.EngramModelStatus(refusal=reason),
        worker_pb2.EngramModelStatus(model="kjv", version="1b" * 32),  # for the scripted worker, which refuses unknown names
    ]
    worker.script = scripts["refuse_with"](grpc.StatusCode.UNAVAILABLE, reason)
    for answer in (ask(gateway, engram="kjv"), ask(gateway, f"{MODEL}+kjv")):
        assert reason in error_of(answer, 503)["message"]
        assert answer.headers["retry-after"] == "1"

    def looked_up() -> httpx.Response:
        found: httpx.Response = gateway.http.get(f"/v1/models/{MODEL}+code")
        return found

    wait_until(lambda: looked_up().status_code == 503, "the list is followed")
    assert reason in error_of(looked_up(), 503)["message"]
    assert looked_up().headers["retry-after"] == "1"


def test_models_lists_the_model_and_an_alias_for_each_memory_that_can_be_chosen(gateway: Any, worker: Any) -> None:
    def listed() -> dict[str, Any]:
        return {model["id"]: model["treadle"] for model in gateway.http.get("/v1/models").json()["data"]}

    all_of_them = [MODEL, f"{MODEL}+code", f"{MODEL}+kjv", f"{MODEL}+smollm2-demo"]
    wait_until(lambda: list(listed()) == all_of_them, "the list is this test's, not an earlier one's")
    demo = {"engram": "smollm2-demo", "version": "ab" * 32, "default": True, "open": True}
    assert listed()[MODEL] == listed()[f"{MODEL}+smollm2-demo"] == demo
    assert listed()[f"{MODEL}+kjv"] == {"engram": "kjv", "version": KJV_VERSION, "default": False, "open": True}
    assert listed()[f"{MODEL}+code"]["open"] is False


def test_an_alias_is_found_with_its_plus_written_either_way(gateway: Any, worker: Any) -> None:
    for path in (f"{MODEL}+kjv", f"{MODEL}%2Bkjv", f"{MODEL}%2Bkjv%401b1b1b1b"):
        found = gateway.http.get(f"/v1/models/{path}").json()
        assert (found["treadle"]["engram"], found["treadle"]["version"]) == ("kjv", KJV_VERSION)
    assert gateway.http.get(f"/v1/models/{MODEL}+none").json()["treadle"] == {
        "engram": None, "version": None, "default": False, "open": False,
    }  # fmt: skip
    for path in (f"{MODEL}+bible", f"{MODEL}+foreign", f"{MODEL}%2Bkjv%40ffffffff", "another"):
        assert error_of(gateway.http.get(f"/v1/models/{path}"), 404)["code"] == "model_not_found"


def test_a_worker_that_lists_no_memories_still_has_its_own(gateway: Any, worker: Any) -> None:
    worker.status["engram_models"] = []
    wait_until(lambda: len(gateway.http.get("/v1/models").json()["data"]) == 2, "the list is followed")
    assert ask(gateway, f"{MODEL}+smollm2-demo").status_code == 200
    error_of(ask(gateway, f"{MODEL}+kjv"), 404)


@pytest.fixture
def keyed(start_gateway: Any, session_worker: Any, worker: Any, tmp_path: Path) -> Any:
    """A gateway whose keys have default memories."""
    keys = tmp_path / "keys"
    keys.write_text(
        "plain-key\n# with a default\nkjv-key engram=kjv\nold-key  engram=kjv@1b1b1b1b\nbare-key engram=none\nlost-key engram=gone\n"
    )
    keys.chmod(0o600)
    gateway = start_gateway("--worker", session_worker.address, "--api-key-file", str(keys), "--log-level", "debug")
    gateway.wait_ready()
    return gateway


def show(gateway: Any, key: str) -> None:
    gateway.http.headers["authorization"] = f"Bearer {key}"


@pytest.mark.parametrize(
    ("key", "chosen"), [("plain-key", None), ("kjv-key", ("kjv", "")), ("old-key", ("kjv", "1b1b1b1b")), ("bare-key", ("", ""))]
)
def test_a_key_has_a_default_memory_of_its_own(keyed: Any, worker: Any, key: str, chosen: tuple[str, str] | None) -> None:
    show(keyed, key)
    assert ask(keyed).status_code == 200
    assert chosen_of(worker) == chosen
    assert keyed.figure("treadle_gateway_memory_choices_total", by="key", memory="none" if chosen == ("", "") else "some") == (
        1 if chosen else 0
    )


def test_what_a_request_says_counts_before_the_default_of_its_key(keyed: Any, worker: Any) -> None:
    show(keyed, "kjv-key")
    for model, engram, chosen in (
        (MODEL, "code", ("code", "")), (f"{MODEL}+code", None, ("code", "")), (MODEL, "none", ("", "")), (MODEL, "default", None),
    ):  # fmt: skip
        assert ask(keyed, model, engram).status_code == 200
        assert chosen_of(worker) == chosen
    assert worker.requests[0].cache_salt == worker.requests[-1].cache_salt != ""


def test_models_are_listed_with_the_default_of_the_key_that_asks(keyed: Any) -> None:
    show(keyed, "kjv-key")
    listed = {model["id"]: model["treadle"] for model in keyed.http.get("/v1/models").json()["data"]}
    assert listed[MODEL]["engram"] == "kjv"
    assert [name for name, memory in listed.items() if memory["default"]] == [MODEL, f"{MODEL}+kjv"]
    show(keyed, "bare-key")
    assert keyed.http.get(f"/v1/models/{MODEL}").json()["treadle"]["engram"] is None


def test_a_keys_default_that_is_not_there_is_refused_and_another_can_be_chosen(keyed: Any) -> None:
    show(keyed, "lost-key")
    error = error_of(ask(keyed), 400)
    assert (error["param"], error["code"]) == ("treadle.engram", "engram_not_found")
    assert "default memory of this key" in error["message"]
    assert ask(keyed, engram="kjv").status_code == 200


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("secret-key memory=kjv", "engram=VALUE"),
        ("secret-key another-word", "engram=VALUE"),
        ("secret-key engram=", "engram=VALUE"),
        ("secret-key engram=kjv engram=code", "twice"),
        ("secret-key engram=kjv@12", "NAME@VERSION"),
        ("secret-key engram=King/James", "a name is"),
        ("first-key", "line 1 again"),
    ],
)
async def test_a_key_file_with_a_wrong_line_stops_the_start_and_shows_no_key(tmp_path: Path, line: str, told: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"first-key\n{line}\n")
    with pytest.raises(WrongSetting) as stopped:
        await serve(Settings(listen="127.0.0.1:0", api_key_file=keys))
    message = str(stopped.value)
    assert message.startswith(f"api_key_file: {keys} line 2: ")
    assert told in message
    assert "\n" not in message
    assert not any(word in message for word in ("secret", "first-key", "another-word"))


def test_logs_hold_no_key_of_a_file_with_options(keyed: Any) -> None:
    show(keyed, "kjv-key")
    ask(keyed)
    show(keyed, "lost-key")
    ask(keyed)
    assert keyed.terminate() == 0
    assert not any(word in keyed.log for word in ("kjv-key", "lost-key"))
