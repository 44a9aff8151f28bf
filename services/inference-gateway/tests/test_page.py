"""The page at `/`, in a real browser: what it shows, that its charts move, that it chats, stops and asks for a key."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_gateway.page_route import policy
from treadle.inference.v1 import worker_pb2
from treadle_loadtests.browser import MISSING, Browser, chromium

MODEL = "tiny-chat"
needs_browser = pytest.mark.skipif(chromium() is None, reason=MISSING)


@pytest.fixture
def browse() -> Iterator[Callable[..., Browser]]:
    """Opens the page of a gateway in a browser of its own."""
    opened: list[Browser] = []

    def at(gateway: Any, **options: Any) -> Browser:
        path = chromium()
        assert path is not None
        opened.append(Browser(path, **options))
        opened[-1].open(f"{gateway.url}/")
        return opened[-1]

    yield at
    for browser in opened:
        browser.close()


TOKENS_MAX = 4000  # of a paced answer that nobody ends: two minutes


def paced(worker: Any, ends: threading.Event) -> Any:
    """An answer that goes on until it is told to end, whose worker counts as a real one does: tokens, steps, tickets and bytes grow."""

    async def answer(request: worker_pb2.GenerateRequest, context: Any) -> Any:
        tokens = 0
        layer = worker_pb2.EngramLayerStatus(layer=2, slack_seconds_p50=0.004, slack_seconds_p01=0.001, gather_seconds_p50=0.0002)
        worker.status |= {"requests_running": 1, "engram_transport": "mapped", "engram_layers": [layer], "engine": "embedded"}
        while tokens < 10 or not (ends.is_set() or tokens == TOKENS_MAX):
            await asyncio.sleep(0.03)
            layer.tickets += 1
            layer.tickets_in_time += tokens != 3
            layer.row_bytes += 81920
            text, tokens = f"w{tokens} ", tokens + 1
            worker.status |= {"completion_tokens": tokens, "steps": tokens, "step_seconds": 0.03 * tokens}
            yield worker_pb2.GenerateResponse(token_ids=b"x", text_delta=text)
        worker.status |= {"requests_running": 0}
        report = worker_pb2.MemoryReport(
            kind="engram", name="kjv", version="1b" * 32, transport="mapped", tickets=tokens, tickets_in_time=tokens - 1
        )
        usage = worker_pb2.Usage(prompt_tokens=9, cached_tokens=5, completion_tokens=tokens)
        yield worker_pb2.GenerateResponse(finish_reason=worker_pb2.FINISH_REASON_STOP, usage=usage, memory=[report])

    return answer


def ask(browser: Browser, text: str) -> None:
    browser.wait("document.querySelector('#model').value !== ''", "the models are listed")
    browser.value("document.querySelector('#tokens').value = 30")  # the model of these tests has 256 in all
    browser.write("#question", text)
    browser.press("Enter", 13)


def newest(browser: Browser, chart: str) -> str:
    return browser.text(f"[data-chart='{chart}'] .now")


@needs_browser
def test_the_page_loads_without_an_error_and_asks_nobody_but_its_gateway(gateway: Any, browse: Any) -> None:
    browser = browse(gateway)
    browser.wait("document.querySelector('#state').className === 'good'", "the state is shown")
    assert browser.text("#state").startswith("ready · 1 of 1 workers")
    assert browser.text("#workers tbody tr td") == gateway_worker(gateway)
    assert "kjv" in browser.text("#memories")
    assert "made for another tokenizer" in browser.text("#memories")
    assert browser.errors == []
    assert all(url.startswith((gateway.url, "data:", "about:")) for url in browser.urls), browser.urls
    assert browser.value("[...document.querySelectorAll('input, select, textarea')].every((field) => field.labels.length > 0)")
    assert browser.value("[...document.querySelectorAll('svg')].every((chart) => chart.getAttribute('aria-label'))")


def gateway_worker(gateway: Any) -> str:
    return str(gateway.http.get("/v1/treadle/status").json()["workers"][0]["name"])


@needs_browser
def test_a_chat_streams_says_which_memory_answered_and_moves_the_charts(gateway: Any, worker: Any, browse: Any) -> None:
    ends = threading.Event()
    worker.script = paced(worker, ends)
    browser = browse(gateway)
    browser.wait("document.querySelector('#memory').options.length > 2", "the memories are listed")
    browser.value("document.querySelector('#memory').value = 'kjv'")
    ask(browser, "Who was the father of Isaac?")
    first = browser.wait("document.querySelector('.turn.assistant p').textContent", "the answer begins")
    browser.wait(f"document.querySelector('.turn.assistant p').textContent.length > {len(first)}", "it grows")
    assert browser.value("document.querySelector('.turn.assistant').getAttribute('aria-busy')") == "true"
    browser.until(lambda: re.search(r"answers [1-9]", newest(browser, "Tokens")), "tokens are charted")
    assert re.search(r"mapped [1-9].*B/s", newest(browser, "Bytes of rows by transport"))
    assert newest(browser, "Slack of row lookups") == "p50 4 ms · p01 1 ms"
    assert re.search(r"running 1", newest(browser, "Requests"))
    assert browser.value("document.querySelector(\"[data-chart='Tokens'] polyline\").getAttribute('points').trim().length") > 0
    ends.set()
    browser.wait("document.querySelector('.turn.assistant ul')", "the answer ends")
    told, tokens = browser.text(".turn.assistant ul"), worker.status["completion_tokens"]
    in_time = f"{tokens - 1} of {tokens}"
    for words in ("memory kjv@1b1b1b1b (mapped)", f"{in_time} tickets in time", "not degraded", "9 prompt tokens, 5 cached"):
        assert words in told
    assert re.search(r"first token after \d+.* ms", told)
    assert re.search(r"[1-9]\d*(\.\d)? tokens/s", told)
    assert browser.text(".turn.assistant p").startswith("w0 w1 w2 ")
    assert worker.requests[-1].engram.model == "kjv"
    browser.until(lambda: in_time in browser.text("#layers"), "the layer's figures are shown")
    assert browser.errors == []


@needs_browser
def test_a_chat_behind_a_prefix_says_what_that_did(gateway: Any, worker: Any, browse: Any) -> None:
    browser = browse(gateway)
    browser.wait("document.querySelector('#prefix').options.length === 2", "the prefix that can be chosen is listed")
    assert "made with another language model" in browser.text("#prefixes")
    browser.value("document.querySelector('#prefix').value = 'rules'")
    ask(browser, "May a player?")
    browser.wait("document.querySelector('.turn.assistant ul')", "the answer ends")
    told = browser.text(".turn.assistant ul")
    for words in ("memory smollm2-demo@abababab", "prefix rules@2c2c2c2c, for 900 tokens", "12 of 400 lookups outside"):
        assert words in told
    assert (worker.requests[-1].prefix.name, browser.errors) == ("rules", [])


@needs_browser
def test_a_question_is_asked_with_what_was_said_before(gateway: Any, worker: Any, browse: Any) -> None:
    browser = browse(gateway)
    ask(browser, "One?")
    browser.wait("document.querySelector('.turn.assistant ul')", "the first answer ends")
    ask(browser, "Two?")
    browser.wait("document.querySelectorAll('.turn.assistant ul').length === 2", "the second answer ends")
    first, second = (list(request.prompt_token_ids) for request in worker.requests[-2:])
    assert second[: len(first)] == first
    assert len(second) > len(first) + len("Hé there".encode()) + len("Two?")


@needs_browser
@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stop_ends_the_workers_generation_and_keeps_what_came(
    gateway: Any, worker: Any, scripts: Any, browse: Any, by: str
) -> None:
    worker.script = scripts["endless"]
    browser = browse(gateway)
    ask(browser, "Go on")
    browser.wait("document.querySelector('.turn.assistant p').textContent.length > 3", "the answer comes")
    assert not worker.cancelled.is_set()
    if by == "button":
        browser.click("#stop")
    else:
        browser.press("Escape", 27)
    assert worker.cancelled.wait(5)
    browser.wait("document.querySelector('.turn.assistant ul')", "the page says so")
    assert "stopped" in browser.text(".turn.assistant ul")
    assert browser.text(".turn.assistant p").startswith("xxx")
    assert browser.value("document.querySelector('#stop').disabled && !document.querySelector('#send').disabled")
    worker.script = scripts["hello"]
    ask(browser, "Again")
    browser.wait("document.querySelectorAll('.turn.assistant p')[1].textContent === 'Hé there'", "the next one is answered")
    assert browser.errors == []


@needs_browser
def test_a_new_chat_in_the_middle_of_an_answer_begins_with_nothing_of_the_old_one(
    gateway: Any, worker: Any, scripts: Any, browse: Any
) -> None:
    worker.script = scripts["endless"]
    browser = browse(gateway)
    ask(browser, "A secret")
    browser.wait("document.querySelector('.turn.assistant p').textContent.length > 3", "the answer comes")
    browser.click("#clear")
    browser.wait("document.querySelector('#stop').disabled", "the answer is stopped")
    worker.script = scripts["hello"]
    ask(browser, "Two?")
    browser.wait("document.querySelector('.turn.assistant ul')", "the next one is answered")
    alone = gateway.chat("Two?")
    asked, expected = (list(request.prompt_token_ids) for request in worker.requests[-2:])
    assert alone.status_code == 200
    assert asked == expected
    assert browser.errors == []


@needs_browser
def test_an_error_and_a_degraded_answer_are_told(gateway: Any, worker: Any, scripts: Any, browse: Any) -> None:
    worker.script = scripts["degraded"]
    browser = browse(gateway)
    ask(browser, "Hi")
    browser.wait("document.querySelector('.turn.assistant ul')", "the answer ends")
    assert browser.value("[...document.querySelectorAll('.turn.assistant li.bad')].some((item) => item.textContent === 'degraded')")
    worker.script = scripts["broken"]
    ask(browser, "Hi again")
    browser.wait("document.querySelectorAll('.turn.assistant ul').length === 2", "the broken one ends")
    assert browser.value("document.querySelectorAll('.turn.assistant ul')[1].querySelector('.bad').textContent") == "swapping"
    assert browser.value("document.querySelectorAll('.turn.assistant p')[1].textContent") == "Hé"
    assert browser.errors == []


@needs_browser
def test_with_keys_the_page_shows_nothing_until_one_is_given_and_keeps_it_nowhere(
    start_gateway: Any, session_worker: Any, worker: Any, browse: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("page-key\n")
    gateway = start_gateway("--worker", session_worker.address, "--api-key-file", str(keys))
    gateway.http.headers["authorization"] = "Bearer page-key"
    gateway.wait_ready()
    browser = browse(gateway)
    browser.wait("!document.querySelector('#notice').hidden", "a key is asked for")
    assert browser.text("#notice") == "This gateway asks for a key: give one above."
    assert browser.text("#workers tbody") == ""
    assert browser.value("document.activeElement.id") == "key"
    browser.write("#key", "wrong-key")
    browser.press("Enter", 13)
    browser.wait("document.querySelector('#notice').textContent.includes('does not know that key')", "the wrong key is refused")
    browser.write("#key", "page-key")
    browser.press("Enter", 13)
    browser.wait("document.querySelector('#state').className === 'good'", "the state is shown")
    ask(browser, "Hi")
    browser.wait("document.querySelector('.turn.assistant p').textContent === 'Hé there'", "the chat is answered")
    assert browser.value("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    assert browser.value("document.querySelector('#key').value") == ""
    assert all("401" in error for error in browser.errors), browser.errors  # the browser itself tells of these


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_on_a_phone_light_and_dark(gateway: Any, browse: Any, dark: bool) -> None:
    browser = browse(gateway, width=360, height=740, dark=dark)
    browser.wait("document.querySelector('#state').className === 'good'", "the state is shown")
    assert browser.value("document.documentElement.scrollWidth") <= 360
    ratio = browser.value(_CONTRAST)
    assert ratio >= 4.5, "text and ground are too alike"
    assert browser.value("getComputedStyle(document.body).backgroundColor") == ("rgb(21, 23, 26)" if dark else "rgb(247, 247, 245)")


_CONTRAST = """(() => {
  const light = (color) => { const [r, g, b] = color.match(/\\d+/g).map((part) => { const c = part / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = light(getComputedStyle(document.querySelector('#chat')).backgroundColor);
  return Math.min(...['#state', '#chat label', 'figcaption .now', '#workers td', '#question'].map((selector) => {
    const text = light(getComputedStyle(document.querySelector(selector)).color);
    return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05); }));
})()"""


@needs_browser
def test_the_policy_stops_a_script_that_is_not_the_pages(gateway: Any, browse: Any) -> None:
    browser = browse(gateway)
    browser.wait("document.querySelector('#state').className === 'good'", "the state is shown")
    browser.value(
        "(() => { const made = document.createElement('script'); try { made.textContent = 'window.stranger = 1'; } catch { return; }"
        " document.head.append(made); })()"
    )
    assert browser.value("typeof window.stranger") == "undefined"
    refused = browser.value("fetch('https://example.com/').then(() => 'came', () => 'refused')")
    assert refused == "refused"
    browser.until(lambda: any("Content Security Policy" in error for error in browser.errors), "the browser says why")


def test_the_document_is_whole_small_and_asked_for_again_by_its_tag(gateway: Any) -> None:
    first = gateway.http.get("/")
    assert first.status_code == 200
    assert first.headers["content-type"].startswith("text/html")
    html = first.text
    assert "<!-- s" not in html
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)
    assert len(first.content) < 64 << 10
    directives = dict(part.strip().split(" ", 1) for part in first.headers["content-security-policy"].split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"].count("sha256-") == html.count("<script>") == 5
    assert "unsafe" not in first.headers["content-security-policy"]
    assert first.headers["content-security-policy"] == policy(html)
    again = gateway.http.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert gateway.http.get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_a_page_of_another_host_gets_neither_page_nor_status(gateway: Any) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        assert gateway.http.get("/", headers=headers).status_code == 403
        assert gateway.http.get("/v1/treadle/status", headers=headers).status_code == 403


def test_the_status_tells_what_gateway_and_workers_do(gateway: Any, worker: Any) -> None:
    layer = worker_pb2.EngramLayerStatus(
        layer=7, tickets=10, tickets_in_time=9, slack_seconds_p50=0.002, row_bytes=4096, rows_missing=1
    )
    worker.status |= {"engram_layers": [layer], "completion_tokens": 42, "requests_waiting": 3, "requests_waiting_max": 64}

    def told() -> dict[str, Any]:
        status: dict[str, Any] = gateway.http.get("/v1/treadle/status").json()
        return status

    end = time.monotonic() + 10
    while told()["workers"][0]["completion_tokens"] != 42:
        assert time.monotonic() < end, "the figures are followed"
        time.sleep(0.02)
    status = told()
    assert status["gateway"]["ready"] is True
    assert (status["gateway"]["in_progress"], status["gateway"]["waiting"]) == (0, 0)
    assert status["pools"] == []
    (only,) = status["workers"]
    assert (only["model"], only["pid"], only["requests_waiting"], only["requests_waiting_max"]) == (MODEL, os.getpid(), 3, 64)
    assert only["engram_layers"] == [
        {
            "layer": 7, "tickets": 10, "tickets_in_time": 9, "gather_ms_p50": 0, "gather_ms_p99": 0, "slack_ms_p50": 2,
            "slack_ms_p01": 0, "stall_ms": 0, "row_bytes": 4096, "rows_missing": 1,
        }
    ]  # fmt: skip
    assert {memory["model"]: memory["refusal"] for memory in only["memories"]}["foreign"].startswith("token_map differs")
    assert only["age_seconds"] < 10


def test_the_status_of_a_worker_that_never_came_says_so(start_gateway: Any, other_worker: Any) -> None:
    other_worker.start()
    other_worker.stop()
    gateway = start_gateway("--worker", other_worker.address)
    status = gateway.http.get("/v1/treadle/status").json()
    assert status["gateway"]["ready"] is False
    assert status["gateway"]["reason"]
    assert status["workers"] == [
        {"name": other_worker.address, "ready": False, "reason": status["workers"][0]["reason"], "in_flight": 0}
    ]


def test_a_pool_that_does_not_answer_is_told_of_and_holds_nothing_up(
    start_gateway: Any, session_worker: Any, other_worker: Any
) -> None:
    other_worker.start()
    other_worker.stop()
    gateway = start_gateway("--worker", session_worker.address, "--engram-pool", other_worker.address)
    gateway.wait_ready()
    took = []
    for _ in range(3):
        begun = time.monotonic()
        (pool,) = gateway.http.get("/v1/treadle/status").json()["pools"]
        took.append(time.monotonic() - begun)
    assert min(took) < 1.5  # each would take as long as a pool may take to answer
    assert pool["ready"] is False
    assert pool["reason"]
    assert gateway.chat().status_code == 200
