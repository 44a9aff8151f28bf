"""The files of a version, in pieces, for whoever keeps a copy of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack

from asm_store.domain.compute import Compute
from asm_store.domain.ports import Piece
from asm_store.domain.versions import Kept
from treadle.contract.errors import DataLoss, NotFound
from treadle.kernels import crc32c

PIECE_BYTES = (1 << 20) - 4096  # of a message of 1 MiB; the rest is for the names around it


class FileReading:
    """Answers Get calls."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    async def read(self, kept: Kept) -> AsyncGenerator[Piece, None]:
        """All files in their order. What is deleted meanwhile is read to its end.

        Raises NotFound for what was deleted just before, DataLoss for a file that is shorter than published.
        """
        with kept.in_use(), ExitStack() as opened:
            try:
                files = [
                    (file, opened.enter_context((kept.stored.folder / file.name).open("rb"))) for file in kept.stored.record.files
                ]
            except FileNotFoundError as error:
                raise NotFound(f"{kept.key[0]} {kept.key[1]} was deleted") from error
            for file, source in files:
                offset = 0
                while offset < file.nbytes:
                    data, crc = await self._compute.run(_read, source.read, min(PIECE_BYTES, file.nbytes - offset))
                    if not data:
                        raise DataLoss(f"{file.name}: {offset} of {file.nbytes} bytes are there")
                    yield Piece(file.name, offset, data, crc)
                    offset += len(data)


def _read(read: Callable[[int], bytes], nbytes: int) -> tuple[bytes, int]:
    data = read(nbytes)
    return data, crc32c(data)
