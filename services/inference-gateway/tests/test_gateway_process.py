"""The process: how it starts, refuses to start, follows its worker, keeps its limits and stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from inference_gateway.__main__ import main

MODEL = "tiny-chat"
HI = [{"role": "user", "content": "hi"}]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        time.sleep(0.01)


def run_gateway(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inference_gateway", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--listen", "0.0.0.0:0"], "api_key_file"),
        (["--listen", "[::]:0"], "api_key_file"),
        (["--listen", "8000"], "host:port"),
        (["--worker", "nowhere"], "worker"),
        (["--calls-max", "many"], "calls-max"),
        (["--body-bytes-max", "0"], "body_bytes_max"),
        (["--stop-strings-max", "17"], "stop_strings_max"),
        (["--metrics-listen", "127.0.0.1:9"], "metrics_listen"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--listen", "0.0.0.0:0"], "api_key_file"),
        (["--listen", "127.0.0.1:0", "--api-key-file", "/nowhere"], "/nowhere"),
        (["--listen", "127.0.0.1:0", "--worker-key-file", os.devnull], "no key"),
    ],
)
def test_what_cannot_be_used_stops_the_process_with_one_line(flags: list[str], told: str) -> None:
    ended = run_gateway(*flags)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_an_address_that_is_taken_stops_the_start(gateway: Any) -> None:
    ended = run_gateway("--listen", gateway.ready["listen"])
    assert ended.returncode == 2
    assert "cannot listen" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_ready_line_names_what_serves_and_where(gateway: Any) -> None:
    assert gateway.ready["service"] == "inference-gateway"
    assert gateway.ready["metrics"] == gateway.ready["listen"]
    assert gateway.ready["pid"] == gateway.process.pid
    assert gateway.http.get("/version").json() == {"version": gateway.ready["version"], "proto_version": "v1.0"}


def test_a_gateway_without_a_worker_lives_is_not_ready_and_refuses_with_retry_after(start_gateway: Any, other_worker: Any) -> None:
    other_worker.start()
    other_worker.stop()  # its port is known, and nobody listens there
    gateway = start_gateway("--worker", other_worker.address)
    assert gateway.http.get("/health").status_code == 200
    looked = gateway.http.get("/ready")
    assert looked.status_code == 503
    assert looked.json()["ready"] is False
    assert looked.json()["reason"]
    assert gateway.http.get("/v1/models").status_code == 503
    refused = gateway.chat()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "unavailable"
    other_worker.start()
    gateway.wait_ready()
    assert gateway.chat().status_code == 200


def test_a_worker_that_restarts_is_found_again(start_gateway: Any, other_worker: Any) -> None:
    other_worker.start()
    gateway = start_gateway("--worker", other_worker.address)
    gateway.wait_ready()
    assert gateway.chat().status_code == 200
    other_worker.stop()
    wait_until(lambda: not gateway.is_ready(), "the loss is seen")
    assert gateway.chat().status_code == 503
    assert gateway.http.get("/v1/models").status_code == 200
    other_worker.start()
    gateway.wait_ready()
    assert gateway.chat().status_code == 200


def test_a_worker_that_comes_back_with_another_model_is_served_under_its_name(start_gateway: Any, other_worker: Any) -> None:
    other_worker.start()
    gateway = start_gateway("--worker", other_worker.address)
    gateway.wait_ready()
    other_worker.stop()
    other_worker.status["model"] = "newer"
    other_worker.start()
    wait_until(lambda: gateway.http.get("/v1/models/newer").status_code == 200, "the new name")
    assert gateway.chat().status_code == 404


def test_a_worker_that_drains_makes_the_gateway_not_ready(start_gateway: Any, other_worker: Any) -> None:
    other_worker.start()
    gateway = start_gateway("--worker", other_worker.address)
    gateway.wait_ready()
    other_worker.status["draining"] = True
    wait_until(lambda: "draining" in gateway.http.get("/ready").json().get("reason", ""), "the drain is seen")
    assert not gateway.is_ready()


def test_a_tokenizer_that_is_not_the_workers_is_refused_by_name(start_gateway: Any, other_worker: Any) -> None:
    other_worker.status["tokenizer_digest"] = "0" * 64
    other_worker.start()
    gateway = start_gateway("--worker", other_worker.address)
    wait_until(lambda: "tokenizer_digest" in gateway.http.get("/ready").text, "the reason")
    assert gateway.chat().status_code == 503
    assert "tokenizer_digest" in gateway.log


def test_the_tokenizer_can_be_read_from_another_folder(start_gateway: Any, other_worker: Any, model_dir: Path) -> None:
    other_worker.status["model_dir"] = "/on/another/host"
    other_worker.start()
    lost = start_gateway("--worker", other_worker.address)
    wait_until(lambda: "tokenizer_dir" in lost.http.get("/ready").text, "the reason")
    gateway = start_gateway("--worker", other_worker.address, "--tokenizer-dir", str(model_dir), "--model", "mine")
    gateway.wait_ready()
    listed = [model["id"] for model in gateway.http.get("/v1/models").json()["data"]]
    assert listed == ["mine", "mine+code", "mine+kjv", "mine+smollm2-demo"]


@pytest.fixture
def guarded(start_gateway: Any, session_worker: Any, worker: Any, tmp_path: Path) -> Any:
    """A gateway on all addresses, with two keys, that shows a key to its worker."""
    keys, worker_key = tmp_path / "keys", tmp_path / "worker-key"
    keys.write_text("  # of the tests\nfirst-key\nsecond-key\n")
    keys.chmod(0o600)
    worker_key.write_text("# its\n\nworker-secret\n")
    gateway = start_gateway(
        "--worker", session_worker.address, "--listen", "0.0.0.0:0", "--api-key-file", str(keys),
        "--worker-key-file", str(worker_key), "--log-level", "debug",
    )  # fmt: skip
    gateway.http.base_url = f"http://127.0.0.1:{gateway.ready['listen'].split(':')[1]}"
    gateway.wait_ready()
    return gateway


def test_a_guarded_gateway_opens_to_its_keys_alone(guarded: Any, worker: Any) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first-key"}, {"authorization": "Bearer"}):
        guarded.http.headers.pop("authorization", None)
        guarded.http.headers.update(headers)
        refused = guarded.chat()
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert guarded.http.get("/v1/models").status_code == 401
    assert worker.requests == []
    for key in ("first-key", "second-key"):
        guarded.http.headers["authorization"] = f"Bearer {key}"
        assert guarded.chat().status_code == 200
    salts = [request.cache_salt for request in worker.requests]
    assert len(set(salts)) == 2  # one tenant's cached prefixes are not another's
    assert worker.keys == ["Bearer worker-secret"] * 2
    guarded.http.headers.pop("authorization")
    assert all(guarded.http.get(path).status_code == 200 for path in ("/health", "/ready", "/version", "/openapi.json"))


def test_beyond_loopback_names_of_workers_and_tenants_are_for_keys(guarded: Any, session_worker: Any) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert guarded.http.get("/ready", headers=headers).json() == {"ready": True}  # for whoever balances
        refused = guarded.http.get("/metrics", headers=headers)
        assert refused.status_code == 401
        assert session_worker.address not in refused.text
    shown = {"authorization": "Bearer first-key"}
    assert guarded.http.get("/ready", headers=shown).json()["workers"][0]["name"] == session_worker.address
    assert session_worker.address in guarded.http.get("/metrics", headers=shown).text


def test_beyond_loopback_the_reason_why_a_gateway_is_not_ready_is_for_keys(start_gateway: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key\n")
    (tmp_path / "keys").chmod(0o600)
    flags = ("--worker", "127.0.0.1:1", "--listen", "0.0.0.0:0", "--api-key-file", str(tmp_path / "keys"))
    gateway, public = start_gateway(*flags), start_gateway(*flags, "--metrics-public", "true")
    for each in (gateway, public):
        each.http.base_url = f"http://127.0.0.1:{each.ready['listen'].split(':')[1]}"
    looked = gateway.http.get("/ready")
    assert (looked.status_code, looked.json()) == (503, {"ready": False})
    assert gateway.http.get("/ready", headers={"authorization": "Bearer first-key"}).json()["reason"]
    assert public.http.get("/ready").json()["workers"][0]["name"] == "127.0.0.1:1"
    assert public.http.get("/metrics").status_code == 200


def test_logs_hold_no_key_and_no_text(guarded: Any, worker: Any, scripts: Any) -> None:
    guarded.http.headers["authorization"] = "Bearer first-key"
    assert guarded.chat("a secret thing").status_code == 200
    worker.script = scripts["broken"]
    guarded.chat("a secret thing", stream=True)
    guarded.chat("a secret thing", temperature="a secret thing")
    guarded.http.headers["authorization"] = "Bearer not-a-key"
    guarded.chat("a secret thing")
    assert guarded.terminate() == 0
    assert "stream ended early" in guarded.log
    assert not any(word in guarded.log for word in ("secret", "first-key", "not-a-key", "Hé"))


def test_the_limit_on_calls_is_kept(start_gateway: Any, session_worker: Any, worker: Any, scripts: Any) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--calls-max", "1")
    gateway.wait_ready()
    worker.script = scripts["endless"]
    body = {"model": MODEL, "messages": HI, "stream": True}
    with gateway.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as second:
            refused = second.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert "calls_max" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
    assert worker.cancelled.wait(5)
    worker.script = scripts["hello"]
    wait_until(lambda: gateway.chat().status_code == 200, "the place is free again")


def test_the_limit_on_messages_is_kept(start_gateway: Any, session_worker: Any, worker: Any) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--messages-max", "2")
    gateway.wait_ready()
    refused = gateway.chat(messages=HI * 3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert gateway.chat(messages=HI * 2).status_code == 200


def test_a_body_that_does_not_come_is_given_up(start_gateway: Any, session_worker: Any) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--body-seconds-max", "0.2")
    released = threading.Event()

    def stall() -> Iterator[bytes]:
        yield b"{"
        released.wait(10)
        yield b"}"

    def post() -> None:
        with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as client:
            answers.append(client.post("/v1/completions", content=stall()).status_code)

    answers: list[int] = []
    thread = threading.Thread(target=post)
    thread.start()
    wait_until(
        lambda: gateway.figure("treadle_gateway_requests_total", route="/v1/completions", outcome="late") == 1, "it is given up"
    )
    released.set()
    thread.join(10)
    assert answers == [408]


def test_sigterm_lets_a_stream_end_and_refuses_new_requests(
    start_gateway: Any, session_worker: Any, worker: Any, scripts: Any
) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--drain-grace-seconds", "0")
    gateway.wait_ready()
    release = threading.Event()

    async def wait_for_the_test(request: Any, context: Any) -> Any:
        async for response in scripts["hello"](request, context):
            yield response
            await asyncio.to_thread(release.wait, 10)

    worker.script = wait_for_the_test
    with gateway.http.stream("POST", "/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        gateway.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as second:
            wait_until(lambda: second.get("/ready").status_code == 503, "the drain has begun")
            refused = second.post("/v1/chat/completions", json={"model": MODEL, "messages": HI})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
        release.set()
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert not any("error" in line for line in rest)
    assert gateway.process.wait(10) == 0


def test_after_sigterm_late_requests_are_served_for_a_while_and_readiness_is_off(
    start_gateway: Any, session_worker: Any, worker: Any
) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--drain-grace-seconds", "20")
    gateway.wait_ready()
    gateway.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not gateway.is_ready(), "readiness is off")
    assert gateway.chat().status_code == 200
    assert gateway.figure("treadle_gateway_drain_state") == 1
    assert gateway.terminate() == 0  # a second signal ends the grace


def test_a_grace_ends_by_itself(start_gateway: Any, session_worker: Any, worker: Any) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--drain-grace-seconds", "0.5")
    gateway.wait_ready()
    assert gateway.terminate(20) == 0


def test_a_second_signal_ends_the_grace_too(start_gateway: Any, session_worker: Any, worker: Any) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--drain-grace-seconds", "600")
    gateway.wait_ready()
    gateway.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not gateway.is_ready(), "readiness is off")
    assert gateway.terminate() == 0


def test_a_drain_that_takes_too_long_ends_its_streams_with_an_error(
    start_gateway: Any, session_worker: Any, worker: Any, scripts: Any
) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--drain-seconds", "0.3")
    gateway.wait_ready()
    worker.script = scripts["endless"]
    with gateway.http.stream("POST", "/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        gateway.process.send_signal(signal.SIGTERM)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "unavailable"
    assert worker.cancelled.wait(5)
    assert gateway.process.wait(10) == 0


def test_a_second_signal_ends_the_drain_at_once(start_gateway: Any, session_worker: Any, worker: Any, scripts: Any) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--drain-seconds", "60")
    gateway.wait_ready()
    worker.script = scripts["endless"]
    with gateway.http.stream("POST", "/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        gateway.process.send_signal(signal.SIGINT)
        wait_until(lambda: "draining" in gateway.log, "the drain has begun")
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.process.wait(10) == 0
    assert worker.cancelled.wait(5)


def test_a_guarded_gateway_may_have_any_name(guarded: Any) -> None:
    headers = {"host": "models.example", "origin": "https://app.example", "authorization": "Bearer first-key"}
    assert guarded.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_a_connection_that_never_completes_a_head_is_closed(start_gateway: Any, session_worker: Any, before: bytes) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--idle-seconds", "1")
    host, port = gateway.ready["listen"].split(":")
    with socket.create_connection((host, int(port)), timeout=0.2) as connection:
        connection.sendall(before + b"GET /health HTTP/1.1\r\n")
        end, closed = time.monotonic() + 10, False
        while not closed:
            assert time.monotonic() < end, "the connection is still open"
            try:
                connection.sendall(b"X-Slow: 1\r\n")
                closed = connection.recv(65536) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
    assert gateway.http.get("/health").status_code == 200


def test_the_worker_stays_known_when_memory_is_missing_and_is_asked_again_when_it_drains(
    start_gateway: Any, session_worker: Any, worker: Any
) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--worker-poll-seconds", "60")  # sooner only where it is lost
    gateway.wait_ready()
    told = ["MemoryMissing"]

    async def refuse(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "as told", (("treadle-error", told[0]),))
        yield

    worker.script = refuse
    assert [gateway.chat().status_code for _ in range(2)] == [503, 503]  # the second would wait for a worker that was lost
    assert gateway.log.count("worker ready") == 1
    told[0] = "Draining"
    assert gateway.chat().status_code == 503
    wait_until(lambda: gateway.log.count("worker ready") >= 2, "the worker is asked again")


def test_the_ready_line_of_an_ipv6_address_can_stand_in_a_url(start_gateway: Any, session_worker: Any) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    gateway = start_gateway("--worker", session_worker.address, "--listen", "::1:0")
    assert gateway.ready["listen"].startswith("[::1]:")
    assert gateway.http.get("/health").status_code == 200
