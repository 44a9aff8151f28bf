"""Stand-ins for the services and for the commands of other packages: real processes and ports, canned answers.

Toggles come by environment, `FAKE_<SERVICE>` with `_` for `-`: `die` (say something and exit with 3 before ready), `mute`
(never ready), `stubborn` (ignore SIGTERM), `dies once FILE is there` (after it was ready). `FAKE_ANSWER` is what the gateway says,
`FAKE_MEMORIES` what it offers (names by comma); `FAKE_NATS`, `FAKE_MISSING` and `FAKE_WEIGHTS`: see fake_grpc. `FAKE_DICTIONARY`
`useless`: what is behind a long prefix is as without one; `unbuilt`: `asm build` fails. `FAKE_SHARED`: a file that every service maps.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import typer

from treadle.contract.errors import Unavailable

MODEL = "fake-135m"
VERSIONS = {"kjv": "1b" * 32, "code": "c0de" * 16}  # of memories that no pool knows
DICTIONARY = "a5" * 32  # version of every dictionary
PREFILL_SECONDS_A_CHARACTER = 2e-4  # nearly half a second for a long text: what a demo measures, also beside other work
model_app, pool_app, bench_app, asm_app = typer.Typer(), typer.Typer(), typer.Typer(), typer.Typer()


def main(service: str) -> int:
    """Run one fake service until SIGTERM."""
    toggle = os.environ.get(f"FAKE_{service.upper().replace('-', '_')}", "")
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if toggle == "stubborn" else lambda *_: stopped.set())
    sys.stderr.write(f"{service} begins with {sorted(arguments)}\n")
    if toggle == "die":
        sys.exit("no such port: 42")
    shared = np.memmap(file, np.uint8, "r") if (file := os.environ.get("FAKE_SHARED")) else None
    if service == "inference-gateway":
        listen, metrics = _serve_gateway(arguments), ""
    else:
        fake_grpc = importlib.import_module("fake_grpc")  # only here: gRPC takes longer to import than all the rest
        listen, metrics = fake_grpc.SERVE[service](arguments)
    if toggle != "mute":
        ready = {"ready": True, "service": service, "listen": listen, "metrics": metrics, "pid": os.getpid(), "version": "9.9"}
        print(json.dumps(ready), flush=True)
    fatal = Path(toggle.removeprefix("dies once ").removesuffix(" is there")) if toggle.startswith("dies once ") else None
    while not stopped.wait(0.1 if fatal else 3600):
        if fatal and fatal.exists():
            return 3
    sys.stderr.write(f"{service} drained, {0 if shared is None else len(shared)} B were shared\n")
    return 0


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


def _serve_gateway(arguments: dict[str, str]) -> str:
    host, _, port = arguments["--listen"].rpartition(":")
    Gateway.worker = arguments.get("--worker", "").split(",")[0].rpartition("=")[2]
    Gateway.worker_key = Path(arguments["--worker-key-file"]).read_text().strip()
    server = _Server((host.strip("[]"), int(port)), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"{host}:{server.server_port}"


class Gateway(BaseHTTPRequestHandler):
    """As much of OpenAI's API as the command uses. Keeps the bodies that it got in `seen`."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012 - one list for all, on purpose
    keys: tuple[str, ...] = ()
    worker, worker_key = "", ""
    versions = VERSIONS
    refusal: dict[str, Any] | None = None  # what every question is answered with

    def do_GET(self) -> None:
        """Answer /ready and /v1/models."""
        self._reply(200, {"ready": True} if self.path == "/ready" else {"data": _served_names()})

    def do_POST(self) -> None:
        """Stream an answer, word by word."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if self.keys and self.headers["Authorization"] not in [f"Bearer {key}" for key in self.keys]:
            return self._reply(401, {"error": {"message": "no such key", "code": "invalid_api_key"}})
        if self.refusal is not None:
            return self._reply(400, self.refusal)
        if body["model"] not in [f"{MODEL}+none", *(name["id"] for name in _served_names())]:
            return self._reply(404, {"error": {"message": f"the model {body['model']!r} is not served here"}})
        if self.path == "/v1/completions":
            return self._stream_completion(body) if body.get("stream") else self._complete(body)
        engram = body.get("treadle", {}).get("engram")
        if reason := _why_not(engram):
            error = {"message": reason, "type": "invalid_request_error", "param": "treadle.engram", "code": "engram_not_found"}
            return self._reply(400, {"error": error})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        said = body["messages"][-1]["content"]
        words = os.environ.get("FAKE_ANSWER", f"{said} indeed").split()
        for number, word in enumerate(words):
            self._chunk([{"index": 0, "delta": {"content": ("" if number == 0 else " ") + word}, "finish_reason": None}])
        if said == "break off":
            return None
        self._chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}], treadle={"degraded": said == "forget"} | _used(engram))
        self._chunk([], usage={"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _complete(self, body: dict[str, Any]) -> None:
        """A whole completion; under an alias with that memory's report."""
        text = os.environ.get("FAKE_ANSWER", f"{body['prompt']} indeed")
        engram = body["model"].partition("+")[2]
        self._reply(200, {
            "id": "1", "object": "text_completion", "created": int(time.time()), "model": body["model"],
            "choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": None}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}, "treadle": {"degraded": False} | _used(engram),
        })  # fmt: skip

    def _stream_completion(self, body: dict[str, Any]) -> None:
        """The topic `doors` where a long text is in the prompt or stands behind it, else nothing of use. Words are tokens."""
        prompt, prefix, words = body["prompt"], body["treadle"]["prefix"], _words_of_topics()
        cached = self.seen.count(body) > 1
        tokens = len(prompt.split())
        if not cached:
            time.sleep(PREFILL_SECONDS_A_CHARACTER * len(prompt))
        useful = tokens > words or (prefix != "none" and os.environ.get("FAKE_DICTIONARY") != "useless")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        said = os.environ.get("FAKE_ANSWER", " doors" if useful else " a message to")
        report = {
            "kind": "prefix", "name": prefix, "version": DICTIONARY, "lookups": 90, "lookups_outside": 9, "fell_back": False, "prefix_tokens": words,
        }  # fmt: skip
        self._chunk([{"index": 0, "text": said, "finish_reason": None, "logprobs": None}])
        self._chunk([{"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}])
        details = {"cached_tokens": tokens if cached else 0}
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1, "prompt_tokens_details": details}
        self._chunk([], usage=usage, treadle={"degraded": False, "memory": [] if prefix == "none" else [report]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, choices: list[Any], **more: Any) -> None:
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": int(time.time()), "model": MODEL, "choices": choices}
        self.wfile.write(b"data: " + json.dumps(chunk | more).encode() + b"\n\n")

    def _reply(self, code: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the tests look at what comes back."""


def _memories() -> dict[str, str]:
    """What is offered, with versions, as the worker says; where there is none, as VERSIONS does."""
    offered = os.environ.get("FAKE_MEMORIES", ",".join(VERSIONS)).split(",")
    if Gateway.worker:
        from treadle.client import Fabric
        from treadle.client.errors import InternalError

        # It may be away, or its pool: what was known stays.
        with suppress(Unavailable, InternalError), Fabric(worker=Gateway.worker, key=Gateway.worker_key) as fabric:
            Gateway.versions = {memory.model: memory.version for memory in fabric.worker.status().engram_models}
    return {name: Gateway.versions[name] for name in offered if name in Gateway.versions}


def _why_not(engram: str | None) -> str:
    """Why a choice cannot be had, as the real gateway says it; empty: it can."""
    name, _, version = (engram or "none").partition("@")
    there = _memories() | {"none": "", "default": ""}
    if name not in there:
        return f"'treadle.engram': there is no memory {name!r} here"
    if not there[name].startswith(version):
        return f"'treadle.engram': engram.version: {name!r} has no version {version}…; there is {there[name]}"
    return ""


def _served_names() -> list[dict[str, Any]]:
    aliases = [
        {"id": f"{MODEL}+{name}", "treadle": {"engram": name, "version": version, "default": False, "open": name == "kjv"}}
        for name, version in _memories().items()
    ]
    return [{"id": MODEL, "treadle": {"engram": None, "version": None, "default": True, "open": False}}, *aliases]


def _used(engram: str | None) -> dict[str, Any]:
    if engram not in (memories := _memories()):
        return {}
    report = {
        "kind": "engram", "name": engram, "version": memories[engram], "transport": "mapped", "tickets": 2, "tickets_in_time": 2,
        "rows_missing": 0, "shadowed": False,
    }  # fmt: skip
    return {"memory": [report]}


def _words_of_topics() -> int:
    """Words of the text that the demo builds."""
    from treadle.cli.demo_prefix_answers import TEXT_FILE

    return len(TEXT_FILE.read_text().split())


@model_app.callback()
def _model() -> None:
    """Models."""


@model_app.command()
def fetch(name: str, as_json: bool = typer.Option(False, "--json")) -> None:
    """Say where the model is."""
    if name == "unknown":
        raise SystemExit(f"no model {name!r}; there is {MODEL}")
    print(json.dumps({"model": name, "path": os.environ["FAKE_MODEL_DIR"]}))


@pool_app.callback()
def _pool() -> None:
    """Tables."""


@pool_app.command()
def load(
    name: str = typer.Argument(""),
    grown: str = "",
    random: bool = False,
    profile: str = "",
    tokenizer: str = "",
    pool: str = "",
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    """Tell the fake pool; random rows are only talked about."""
    from treadle.client import Fabric

    if grown:
        with Fabric(engram=pool) as fabric:
            name = fabric.engram.load_grown(Path(grown)).model.name
    print(json.dumps({"model": name, "pool": pool}))


@pool_app.command("rm")
def remove(name: str, pool: str = "", as_json: bool = typer.Option(False, "--json")) -> None:
    """Tell the fake pool."""
    from treadle.client import Fabric

    with Fabric(engram=pool) as fabric:
        fabric.engram.remove(name)
    print(json.dumps({"model": name}))


@asm_app.callback()
def _asm() -> None:
    """Dictionaries."""


@asm_app.command()
def where(store: str = typer.Option("nowhere", envvar="TREADLE_ASM_STORE")) -> None:
    """Say which store it would call."""
    print(json.dumps({"store": store}))


@asm_app.command()
def build(
    name: str = "", model: str = "", prefix: Path = Path(), traces: Path = Path(), out: Path = Path(), entries: int = 0,
    source: str = "", as_json: bool = typer.Option(False, "--json"),
) -> None:  # fmt: skip
    """Print a card with figures that nobody has measured."""
    toggle = os.environ.get("FAKE_DICTIONARY", "")
    if toggle == "unbuilt":
        raise SystemExit(f"{traces} is no file of traces")
    learnt = traces.read_text().count("\n")
    nothing = {"tokens": 99, "agreement": 0.25, "kl": 3.0}
    print(json.dumps({
        "name": name, "version": DICTIONARY, "source": source, "prefix": {"tokens": len(prefix.read_text().split())},
        "calibration": {"traces": learnt, "tokens": 20 * learnt},
        "sizes": {"storage_bytes": entries * 12_000, "prefix_kv_bytes": 15 << 20, "storage_share": 0.195},
        "fidelity": {"dictionary": nothing if toggle == "useless" else {"tokens": 99, "agreement": 0.875, "kl": 0.25}, "nothing": nothing},
    }))  # fmt: skip


@asm_app.command()
def publish(folder: Path, store: str = "", as_json: bool = typer.Option(False, "--json")) -> None:
    """Say that it is kept."""
    print(json.dumps({"name": folder.name, "version": DICTIONARY, "current": True, "seconds": 0.25, "store": store}))


@bench_app.callback()
def _bench() -> None:
    """Figures."""


@bench_app.command()
def chat(quick: bool = False, pool: str = "", model_dir: str = "", as_json: bool = typer.Option(False, "--json")) -> None:
    """Two measurements."""
    params = {"phase": "decode", "batch": 1}
    rows = [
        {"name": "local", "params": params, "unit": "tok/s", "median": 20.0, "p99": 21.0, "n": 3},
        {"name": "mapped", "params": params, "unit": "tok/s", "median": 19.9, "ratio": 0.995, "ratio_ci95": [0.98, 1.01], "baseline": "local"},
    ]  # fmt: skip
    print(json.dumps({"command": "treadle bench chat", "machine": {"cpu": "fake"}, "versions": {}, "rows": rows}))
