"""Gateway and worker as real processes, TLS between them: who may call whom, whose cache is whose, and what logs hold."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import until

READY_SECONDS = 120
CANARY = "kingfisher-9174-canary"
WORDS = "Weaving is an old craft, and the loom is older than most of what people remember about it. " * 6
KEYS = {"alpha": "", "beta": "", "team-one": "tenant=team", "team-two": "tenant=team"}

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="there is no openssl to make certificates with: apt-get install openssl"
)


class Process:
    """A service that printed its ready line; all that it says otherwise is in `log`."""

    def __init__(self, module: str, log: Path, *flags: str) -> None:
        self._log = log
        command = [sys.executable, "-m", module, "--listen", "127.0.0.1:0", "--log-level", "debug", *flags]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], READY_SECONDS)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            self.close()
            raise AssertionError(f"{module} is not ready: {self.log[-2000:]}")
        self.listen: str = json.loads(line)["listen"]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Fabric:
    """A worker that asks for a certificate, a gateway that has one, and files to start others with."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.folder, self._model_dir = folder, model_dir
        self.ca, self.other_ca = authority(folder, "ca"), authority(folder, "other-ca")
        self.worker_cert = signed(folder, "worker", "ca")
        self.gateway_cert = signed(folder, "gateway", "ca")
        self.stranger_cert = signed(folder, "stranger", "other-ca")
        self.keys = folder / "keys"
        self.keys.touch(0o600)
        self.keys.write_text("".join(f"{name}-key {options}\n" for name, options in KEYS.items()))
        self.worker = Process(
            "inference_worker", folder / "worker.log", "--model", str(model_dir), "--engram-pool", "", "--metrics-listen", "127.0.0.1:0",
            "--tls-cert-file", str(self.worker_cert[0]), "--tls-key-file", str(self.worker_cert[1]), "--tls-client-root-file", str(self.ca),
        )  # fmt: skip
        try:
            self.gateway = self.start_gateway("gateway", self.gateway_cert, "--api-key-file", str(self.keys))
        except BaseException:
            self.worker.close()
            raise

    def start_gateway(self, name: str, cert: tuple[Path, Path] | None, *flags: str, root: Path | None = None) -> Process:
        tls = ["--worker-tls-root-file", str(root or self.ca)]
        if cert is not None:
            tls += ["--worker-tls-cert-file", str(cert[0]), "--worker-tls-key-file", str(cert[1])]
        poll = ("--worker-poll-seconds", "0.2")
        return Process("inference_gateway", self.folder / f"{name}.log", "--worker", self.worker.listen, *poll, *tls, *flags)

    def ask(self, who: str, text: str, **more: Any) -> httpx.Response:
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0, **more}
        headers = {"authorization": f"Bearer {who}-key"}
        return httpx.post(
            f"http://{self.gateway.listen}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
        )

    def cached(self, who: str, text: str, **more: Any) -> int:
        answer = self.ask(who, text, **more)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)


def authority(folder: Path, name: str) -> Path:
    """A root of its own: its certificate; the key lies beside it."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req",
        "-x509",
        *curve,
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-keyout",
        f"{folder}/{name}.key",
        "-out",
        f"{folder}/{name}.pem",
    )
    return folder / f"{name}.pem"


def signed(folder: Path, name: str, by: str) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1, signed by an authority."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.csr")
    (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        "x509", "-req", "-in", f"{folder}/{name}.csr", "-CA", f"{folder}/{by}.pem", "-CAkey", f"{folder}/{by}.key", "-CAcreateserial",
        "-days", "2", "-extfile", f"{folder}/{name}.ext", "-out", f"{folder}/{name}.pem",
    )  # fmt: skip
    return folder / f"{name}.pem", folder / f"{name}.key"


@pytest.fixture(scope="module")
def safe(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    running = Fabric(tmp_path_factory.mktemp("safe"), model_dir)
    try:
        until(lambda: is_ready(running.gateway))
        yield running
    finally:
        running.gateway.close()
        running.worker.close()


def is_ready(gateway: Process) -> bool:
    return reason_of(gateway) is None


def is_refused(gateway: Process) -> bool:
    return reason_of(gateway) not in (None, "the worker has not answered yet")


def reason_of(gateway: Process) -> str | None:
    looked = httpx.get(f"http://{gateway.listen}/ready", timeout=30, trust_env=False).json()
    return None if looked["ready"] else str(looked["reason"])


def test_a_gateway_with_a_certificate_of_the_workers_authority_is_let_in(safe: Fabric) -> None:
    assert safe.ask("alpha", "Hi").status_code == 200


def test_a_worker_lets_in_no_stranger_and_a_gateway_believes_none(safe: Fabric) -> None:
    with ExitStack() as stack:
        for name, cert, root in (
            ("stranger", safe.stranger_cert, None), ("nobody", None, None), ("fooled", safe.gateway_cert, safe.other_ca),
        ):  # fmt: skip
            gateway = safe.start_gateway(name, cert, root=root)
            stack.callback(gateway.close)
            until(partial(is_refused, gateway))
            body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}]}
            refused = httpx.post(f"http://{gateway.listen}/v1/chat/completions", json=body, timeout=30, trust_env=False)
            assert refused.status_code == 503, name
            assert not is_ready(gateway)
    assert is_ready(safe.gateway)


def test_two_keys_never_share_a_cached_prefix(safe: Fabric) -> None:
    text = f"Of two keys. {WORDS}"
    assert safe.cached("alpha", text) == 0
    assert safe.cached("alpha", text) >= 64  # it is there
    assert safe.cached("beta", text) == 0  # and not for the other
    assert safe.cached("beta", text) >= 64


def test_keys_of_one_tenant_do_share(safe: Fabric) -> None:
    text = f"Of one team. {WORDS}"
    assert safe.cached("team-one", text) == 0
    assert safe.cached("team-two", text) >= 64
    assert safe.cached("alpha", text) == 0


def test_a_salt_in_a_request_divides_its_own_tenant_and_opens_no_others(safe: Fabric) -> None:
    text = f"Of salts. {WORDS}"
    assert safe.cached("alpha", text, cache_salt="mine") == 0
    assert safe.cached("alpha", text, cache_salt="mine") >= 64
    assert safe.cached("alpha", text) == 0
    assert safe.cached("alpha", text, cache_salt="other") == 0
    assert safe.cached("beta", text, cache_salt="mine") == 0
    refused = safe.ask("alpha", text, cache_salt="")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_no_log_holds_a_prompt_an_answer_or_a_key_whatever_goes_wrong(safe: Fabric) -> None:
    url, headers = f"http://{safe.gateway.listen}", {"authorization": "Bearer alpha-key"}
    told = safe.ask("alpha", f"Repeat: {CANARY}", max_tokens=12).json()["choices"][0]["message"]["content"]
    assert told
    assert safe.ask("alpha", CANARY, stream=True).status_code == 200
    wrong: list[dict[str, Any]] = [
        {"temperature": CANARY}, {"model": CANARY}, {"messages": [{"role": CANARY, "content": CANARY}]}, {"stop": [CANARY, 5]},
        {"treadle": {"engram": CANARY}}, {"treadle": {CANARY: CANARY}}, {CANARY: CANARY}, {"tools": [{"name": CANARY}]},
        {"messages": [{"role": "system", "content": CANARY}] * 3}, {"max_tokens": 100_000}, {"stop": [CANARY]},
        {"messages": [{"role": "user", "content": f"{CANARY} \ud800"}]}, {"messages": [{"role": "user", "content": CANARY * 5000}]},
    ]  # fmt: skip
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        for more in wrong:
            body = json.dumps({"model": "smollm2-135m", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 2, **more})
            assert client.post("/v1/chat/completions", content=body).status_code < 500, more
        for raw in (f'{{"model": "{CANARY}', f"{CANARY}", f'["{CANARY}"]', f'{{"{CANARY}": {{' * 300, "\x00" + CANARY):
            assert client.post("/v1/chat/completions", content=raw).status_code == 400
        client.get(f"/{CANARY}?{CANARY}={CANARY}", headers={"x-request-id": f"{CANARY} !", "cookie": CANARY})
        client.get("/v1/models", headers={"authorization": f"Bearer {CANARY}"})
        with client.stream(
            "POST", "/v1/completions", json={"model": "smollm2-135m", "prompt": CANARY, "stream": True, "max_tokens": 400}
        ) as gone:
            next(gone.iter_lines())  # and leaves
    for log in (safe.gateway.log, safe.worker.log):
        assert log  # debug says something
        assert not any(word in log for word in (CANARY, told, *(f"{name}-key" for name in KEYS)))
        assert "Traceback" not in log
