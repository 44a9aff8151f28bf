"""A connection that takes longer: forwards TCP and holds each piece back for a while, in both directions together `seconds`.

`python -m treadle_bench.serve.delay TARGET_HOST TARGET_PORT SECONDS` prints its port as a JSON line and runs until standard input
ends. The kernel here has no netem, so packets of a worker's namespace are redirected to this; its own go out with a mark that the
rule leaves alone.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import suppress

MARK = 0x7E
PIECE_BYTES = 1 << 18


async def serve(host: str, port: int, seconds: float) -> None:
    """Forward until standard input ends. Requests wait half of `seconds`, replies the other half."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out = socket.socket()
        out.setblocking(False)
        out.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        await asyncio.get_running_loop().sock_connect(out, (host, port))
        there, back = await asyncio.open_connection(sock=out)
        for end in (writer, back):
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(asyncio.CancelledError):  # the end of this program ends its connections
            await asyncio.gather(_later(reader, back, seconds / 2), _later(there, writer, seconds / 2))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)
        server.close()


async def _later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Every piece `seconds` after it came, without waiting for the one before."""
    loop = asyncio.get_running_loop()
    while piece := await reader.read(PIECE_BYTES):
        loop.call_later(seconds, writer.write, piece)
    loop.call_later(seconds, writer.close)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
