import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle.chassis.server import FAILED
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

SERVICE = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from treadle.chassis import log
from treadle.chassis.errors import CONTRACT_STATUS
from treadle.chassis.server import run_service
from treadle.chassis.settings import ServerSettings, WrongSetting, load_settings
from treadle.contract import errors
from treadle.engram.v1 import engram_pool_pb2 as pb, engram_pool_pb2_grpc as pb_grpc

class Servicer(pb_grpc.EngramPoolServiceServicer):
    async def Status(self, request, context):
        return pb.StatusResponse(build_version="1")
    async def OpenModel(self, request, context):
        raise errors.FingerprintMismatch("row_bytes", 320, 264)
    async def ListModels(self, request, context):
        raise ZeroDivisionError("a secret detail")
    async def RemoveModel(self, request, context):
        raise errors.ResourceExhausted("full", 2.5)
    async def VerifyModel(self, request, context):
        raise errors.NotFound("x" * 100_000)
        yield
    async def Gather(self, request, context):
        yield pb.GatherResponse(data=b"x")
        raise errors.DataLoss("torn")
    async def Lookup(self, request, context):
        await context.write(pb.LookupResponse())
        raise errors.DataLoss("torn")
    async def PromoteModel(self, request, context):
        failed.set()
        return pb.PromoteModelResponse()
    async def WatchModels(self, request, context):
        yield pb.WatchModelsResponse()
        await asyncio.sleep(60)

def register(server):
    pb_grpc.add_EngramPoolServiceServicer_to_server(Servicer(), server)
    return ["treadle.engram.v1.EngramPoolService"]

settings = load_settings(ServerSettings, "TEST", "testservice")
log.configure(settings.log_level, settings.log_format)
async def main():
    global failed
    failed = asyncio.Event()
    return await run_service(
        "test", settings, register, area="engram", status=CONTRACT_STATUS, registry=CollectorRegistry(), build_version="1", failed=failed,
    )
try:
    sys.exit(asyncio.run(main()))
except WrongSetting as error:
    sys.exit(f"testservice: {error}")
"""


class Running:
    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.channel = grpc.insecure_channel(self.ready["listen"])
        self.stub = pb_grpc.EngramPoolServiceStub(self.channel)

    def stop(self) -> tuple[int, str]:
        self.channel.close()
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@pytest.fixture
def service() -> Iterator[Running]:
    running = Running("--drain-seconds", "0.2")
    yield running
    if running.process.poll() is None:
        running.stop()


def failure(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def details(error: grpc.RpcError) -> dict[str, str]:
    metadata: Any = error.trailing_metadata()
    return {key: str(value) for key, value in metadata}


def test_a_service_that_can_answer_no_more_drains_and_says_so_with_its_exit_code(service: Running) -> None:
    service.stub.PromoteModel(pb.PromoteModelRequest(), timeout=5)
    assert service.process.wait(timeout=20) == FAILED == 3
    assert service.stop()[0] == 3


def test_the_ready_line_names_the_real_addresses_and_the_service_is_healthy(service: Running) -> None:
    assert service.ready["pid"] == service.process.pid
    assert not service.ready["listen"].endswith(":0")
    check = health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert check.status == health_pb2.HealthCheckResponse.SERVING
    assert service.stub.Status(pb.StatusRequest(), timeout=5).build_version == "1"
    with urllib.request.urlopen(f"http://{service.ready['metrics']}/metrics", timeout=5) as page:
        text = page.read().decode()
    assert 'treadle_engram_rpc_calls_total{code="OK",method="/treadle.engram.v1.EngramPoolService/Status"} 1.0' in text


def test_domain_errors_become_their_codes_with_details(service: Running) -> None:
    error = failure(lambda: service.stub.OpenModel(pb.OpenModelRequest(), timeout=5))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert details(error)["treadle-field"] == "row_bytes"
    error = failure(lambda: service.stub.RemoveModel(pb.RemoveModelRequest(), timeout=5))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error)["treadle-retry-after-seconds"] == "2.5"
    error = failure(lambda: list(service.stub.Gather(pb.GatherRequest(), timeout=5)))
    assert error.code() is grpc.StatusCode.DATA_LOSS


def test_a_handler_may_write_its_messages_itself(service: Running) -> None:
    answers = service.stub.Lookup(pb.LookupRequest(), timeout=5)
    assert next(answers) == pb.LookupResponse()
    assert failure(lambda: next(answers)).code() is grpc.StatusCode.DATA_LOSS


def test_a_long_error_still_arrives_as_what_it_is(service: Running) -> None:
    error = failure(lambda: list(service.stub.VerifyModel(pb.VerifyModelRequest(), timeout=5)))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert len(error.details() or "") < 5000


def test_health_can_be_watched(service: Running) -> None:
    watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest(), timeout=5)
    assert next(iter(watch)).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_a_bug_is_answered_internal_without_details_and_logged_with_its_traceback(service: Running) -> None:
    error = failure(lambda: service.stub.ListModels(pb.ListModelsRequest(), timeout=5))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    code, logged = service.stop()
    assert code == 0
    assert "a secret detail" in logged
    assert "Traceback" in logged


def test_a_stop_ends_streams_that_would_go_on_for_ever(service: Running) -> None:
    stream = service.stub.WatchModels(pb.WatchModelsRequest(), timeout=60)
    next(iter(stream))
    os.kill(service.process.pid, signal.SIGTERM)
    assert failure(lambda: list(stream)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    service.process.communicate(timeout=20)
    assert service.process.returncode == 0


def test_after_a_signal_what_comes_late_is_served_for_a_while_and_the_health_says_no() -> None:
    running = Running("--drain-seconds", "30", "--drain-grace-seconds", "4")
    health = health_pb2_grpc.HealthStub(running.channel)
    watch = iter(health.Watch(health_pb2.HealthCheckRequest(), timeout=20))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    running.process.send_signal(signal.SIGTERM)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert running.stub.Status(pb.StatusRequest(), timeout=5).build_version == "1"
    watch.cancel()
    running.process.communicate(timeout=20)
    assert running.process.returncode == 0


@pytest.mark.parametrize("grace", ["0", "600"])
def test_a_second_signal_ends_a_drain_at_once(grace: str) -> None:
    running = Running("--drain-seconds", "600", "--drain-grace-seconds", grace)
    stream = running.stub.WatchModels(pb.WatchModelsRequest(), timeout=60)
    next(iter(stream))
    watch = iter(health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest(), timeout=20))
    next(watch)
    running.process.send_signal(signal.SIGTERM)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    running.process.send_signal(signal.SIGTERM)
    assert failure(lambda: list(stream)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    _, logged = running.process.communicate(timeout=20)
    assert running.process.returncode == 0
    assert "told again" in logged


def test_calls_without_the_key_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# comment\nsesame\n")
    running = Running("--api-key-file", str(tmp_path / "keys"))
    try:
        error = failure(lambda: running.stub.Status(pb.StatusRequest(), timeout=5))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = running.stub.Status(pb.StatusRequest(), timeout=5, metadata=(("authorization", "Bearer sesame"),))
        assert answer.build_version == "1"
        health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    finally:
        running.stop()


def test_calls_over_the_limit_are_refused_and_the_rest_go_on() -> None:
    running = Running("--calls-max", "1", "--drain-seconds", "0.1")
    try:
        held = iter(running.stub.WatchModels(pb.WatchModelsRequest(), timeout=60))
        next(held)
        error = failure(lambda: running.stub.Status(pb.StatusRequest(), timeout=5))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert float(details(error)["treadle-retry-after-seconds"]) > 0
        held.cancel()  # type: ignore[attr-defined]
        asyncio.run(_until_served(running))
    finally:
        running.stop()


async def _until_served(running: Running) -> None:
    for _ in range(100):
        try:
            running.stub.Status(pb.StatusRequest(), timeout=5)
            return
        except grpc.RpcError:
            await asyncio.sleep(0.05)
    raise AssertionError("the place was never given back")


def test_a_taken_address_is_one_clear_line() -> None:
    running = Running()
    try:
        second = subprocess.run(
            [sys.executable, "-c", SERVICE, "--listen", running.ready["listen"]], capture_output=True, text=True, timeout=30
        )
        assert second.returncode == 1
        assert f"cannot listen on {running.ready['listen']}" in second.stderr.splitlines()[-1]
    finally:
        running.stop()


def self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1, PEM; the certificate is its own root."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
        ],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return cert, key


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="there is no openssl to make certificates with: apt-get install openssl"
)
def test_with_client_roots_only_callers_with_a_certificate_of_theirs_come_in(tmp_path: Path) -> None:
    (server, server_key), (known, known_key), (other, other_key) = (self_signed(tmp_path, name) for name in ("s", "known", "other"))
    running = Running(
        "--listen", "0.0.0.0:0", "--tls-cert-file", str(server), "--tls-key-file", str(server_key), "--tls-client-root-file", str(known)
    )  # fmt: skip
    try:
        address, roots = f"127.0.0.1:{running.ready['listen'].rpartition(':')[2]}", server.read_bytes()
        for key, cert, outcome in ((known_key, known, "1"), (other_key, other, "refused"), (None, None, "refused")):
            shown = (None, None) if key is None or cert is None else (key.read_bytes(), cert.read_bytes())
            with grpc.secure_channel(address, grpc.ssl_channel_credentials(roots, *shown)) as channel:
                status = pb_grpc.EngramPoolServiceStub(channel).Status
                if outcome == "1":
                    assert status(pb.StatusRequest(), timeout=10).build_version == "1"
                else:
                    assert (
                        failure(lambda status=status: status(pb.StatusRequest(), timeout=10)).code() is grpc.StatusCode.UNAVAILABLE
                    )
    finally:
        running.stop()
