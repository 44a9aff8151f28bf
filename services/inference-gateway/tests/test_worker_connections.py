"""Connections of streamed calls to a worker: made once for many, over TLS and Unix sockets, and left when nothing comes of them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from inference_gateway.adapters import grpc_calls, grpc_connection
from inference_gateway.adapters import http2_frames as h2
from inference_gateway.adapters.grpc_calls import CONNECTIONS_MAX, StreamingCalls
from inference_gateway.adapters.grpc_connection import GrpcConnection
from treadle.client import Endpoint
from treadle.contract.errors import InvalidArgument

if TYPE_CHECKING:
    from tests.called_workers import CALL, GREETING, HEAD, WELL, calling, heard, listening, register, serving, still
else:
    from called_workers import CALL, GREETING, HEAD, WELL, calling, heard, listening, register, serving, still


async def test_who_leaves_while_a_connection_is_made_does_not_take_it_from_the_others() -> None:
    asked, go_on, connections = asyncio.Event(), asyncio.Event(), 0

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        asked.set()
        await go_on.wait()
        writer.write(GREETING)
        await reader.readuntil(CALL)
        writer.write(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, HEAD) + h2.frame(h2.HEADERS, 0x5, 1, WELL))
        await reader.read()

    async with listening(slow) as address, calling(address) as calls:
        first, second = (asyncio.create_task(heard(calls)) for _ in range(2))
        await asked.wait()
        first.cancel()
        await asyncio.wait((first,))
        go_on.set()
        assert await second == ([], None)
        assert connections == 1


async def test_closing_ends_connections_in_the_making_and_those_that_take_no_more_calls() -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not begun.is_set():
            writer.write(GREETING)
            await reader.readuntil(CALL)
            writer.write(h2.frame(h2.GOAWAY, 0, 0, h2.number(1) + bytes(4)))
        begun.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        over.set()

    async with listening(serve) as address:
        async with calling(address) as calls:
            tasks = [asyncio.create_task(heard(calls))]
            await begun.wait()
            tasks.append(asyncio.create_task(heard(calls)))
            await still(lambda: len(tasks))
        assert [(await each)[1][0] for each in tasks] == [grpc.StatusCode.UNAVAILABLE] * 2
        await asyncio.wait_for(over.wait(), 5)


async def test_a_server_that_does_not_greet_is_given_up_and_stays_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "CONNECT_SECONDS_MAX", 0.05)
    over = asyncio.Semaphore(0)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until we close
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        over.release()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with calling(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as calls:
        for _ in range(CONNECTIONS_MAX + 2):
            _, error = await heard(calls, seconds=0.01)
            assert error[0] is grpc.StatusCode.DEADLINE_EXCEEDED  # it was the caller who had no time
            _, error = await heard(calls)
            assert error[0] is grpc.StatusCode.UNAVAILABLE
            await over.acquire()
    server.close()


async def test_a_connection_on_which_nothing_came_while_a_call_ran_out_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "SILENT_SECONDS", 2.5)
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(GREETING)
        if connections == 1:  # and then nothing, as after a cable was cut
            await asyncio.Event().wait()
        await reader.readuntil(CALL)
        writer.write(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, HEAD) + h2.frame(h2.HEADERS, 0x5, 1, WELL))
        await reader.read()

    async with listening(serve) as address, calling(address) as calls:
        assert (await heard(calls, seconds=0.25))[1][0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert connections == 1
        assert (await heard(calls, seconds=2.75))[1][0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await heard(calls) == ([], None)
        assert connections == 2


async def test_the_kernel_probes_connections_to_workers_that_may_vanish() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(serve) as address:
        host, _, port = address.rpartition(":")
        connect = asyncio.get_running_loop().create_connection
        transport, connection = await connect(lambda: GrpcConnection([]), host, int(port))
        connected = transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        connection.close()


async def test_a_connection_whose_numbers_are_used_up_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "_LAST_NUMBER", 3)
    peers = set()

    async def tell(request: bytes, context: Any) -> AsyncIterator[bytes]:
        peers.add(context.peer())
        yield b""

    async with serving(tell) as (address, _), calling(address) as calls:
        for _ in range(2 * CONNECTIONS_MAX + 3):
            assert await heard(calls) == ([b""], None)
    assert len(peers) == CONNECTIONS_MAX + 2


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of localhost, PEM; the certificate is its own root."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with: apt-get install openssl")
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


async def test_tls_is_spoken_to_workers_that_ask_for_it_and_for_a_certificate(certificate: tuple[Path, Path]) -> None:
    async def hello(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"hello"

    cert, key = certificate
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())], cert.read_bytes(), require_client_auth=True)
    async with serving(hello, credentials=credentials) as (address, _):
        shown = {"tls_root_file": cert, "tls_cert_file": cert, "tls_key_file": key}
        async with calling(address, **shown) as calls:
            assert await heard(calls) == ([b"hello"], None)
        async with calling(address, tls_root_file=cert) as calls:
            assert (await heard(calls))[1][0] is grpc.StatusCode.UNAVAILABLE
        async with calling(address) as calls:
            assert (await heard(calls))[1][0] is grpc.StatusCode.UNAVAILABLE


async def test_tls_is_spoken_over_unix_sockets_too(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    schemes = []

    async def hello(request: bytes, context: Any) -> AsyncIterator[bytes]:
        schemes.append(context.auth_context().get("transport_security_type"))
        yield b"hello"

    server, address = grpc.aio.server(), f"unix:{tmp_path}/worker"
    register(server, hello)
    server.add_secure_port(address, grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())]))
    await server.start()
    async with calling(address, tls_root_file=cert, key="secret") as calls:
        assert await heard(calls) == ([b"hello"], None)
    assert schemes == [[b"ssl"]]
    await server.stop(None)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A folder with top.pem, middle.pem and localhost.pem, each signed by the one before, and their keys."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with: apt-get install openssl")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    above = None
    for name in ("top", "middle", "localhost"):
        signed: list[str] = [] if above is None else ["-CA", f"{above}.pem", "-CAkey", f"{above}.key"]
        use = "subjectAltName=DNS:localhost" if name == "localhost" else "keyUsage=critical,keyCertSign"
        authority = "basicConstraints=critical,CA:" + ("FALSE" if name == "localhost" else "TRUE")
        told = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}", "-addext", use, "-addext", authority]
        subprocess.run([*new, *signed, *told], check=True, capture_output=True, cwd=tmp_path)
        above = name
    return tmp_path


async def test_a_certificate_that_is_not_the_last_of_its_chain_may_be_the_root(chain: Path) -> None:
    async def hello(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"hello"

    shown = grpc.ssl_server_credentials([((chain / "localhost.key").read_bytes(), (chain / "localhost.pem").read_bytes())])
    async with serving(hello, credentials=shown) as (address, _), calling(address, tls_root_file=chain / "middle.pem") as calls:
        assert await heard(calls) == ([b"hello"], None)


async def test_addresses_that_grpc_understands_are_understood_or_refused_at_once() -> None:
    async def hello(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"hello"

    async with serving(hello) as (address, _):
        for before in ("", "dns:", "dns:///", "ipv4:"):
            async with calling(before + address) as calls:
                assert await heard(calls) == ([b"hello"], None)
    for wrong in ("unix-abstract:worker", "unix:", "host:", ":1", "host:http", "host:70000", "::1:80", "dns://8.8.8.8/host:1",
                  "ipv4:10.0.0.1:1,10.0.0.2:1", "https://host:1"):  # fmt: skip
        with pytest.raises(InvalidArgument, match="address is host:port"):
            StreamingCalls(Endpoint(wrong))
    StreamingCalls(Endpoint("ipv6:[::1]:80")).close()
