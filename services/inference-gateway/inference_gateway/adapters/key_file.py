"""The key file: read at the start, and again whenever it changes, so that a key is revoked without a restart.

Owns its checks and the watch over it; what its options mean is domain.key_options'. A file that cannot be read later leaves the keys as they are and says so; one
that holds no key any more lets nobody in.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from inference_gateway.domain.api_keys import ApiKeys, KeyRecord
from inference_gateway.domain.key_options import OPTIONS, record_of
from treadle.chassis.server import KeyLine, NoKey, read_key_lines
from treadle.chassis.settings import WrongSetting
from treadle.contract.errors import InvalidArgument, TreadleError

log = logging.getLogger("treadle.gateway.keys")
SETTING = "api_key_file"
KEYS_MAX = 10_000
LOOK_SECONDS = 1.0  # a revoked key opens nothing after that


def read_keys(path: Path) -> list[KeyRecord]:
    """The keys of a file, at least one.

    Raises WrongSetting, naming the line and never the key, for what does not fit, and for a file that others may write, or read
    while it holds keys rather than digests; NoKey, which is one, for a file without keys.
    """
    lines = read_key_lines(path, SETTING, OPTIONS)
    if len(lines) > KEYS_MAX:
        raise WrongSetting(f"{SETTING}: {path} holds {len(lines)} keys, at most {KEYS_MAX} are read")
    records = [_record(line, path) for line in lines]
    plain = [line.number for line in lines if not line.hashed]
    _check_mode(path, plain)
    if plain:
        told = "keys stand in the file as they are; `treadle key hash FILE` puts their digests there"
        log.warning(told, extra={"file": str(path), "keys": len(plain), "first_line": plain[0]})
    return records


class KeyFile:
    """Keeps `keys` as a file says."""

    def __init__(self, path: Path, changed: Callable[[str], None]) -> None:
        """changed: called with `read`, `empty` or `failed` after each change that was seen. Raises as `read_keys` does."""
        self._path, self._changed = path, changed
        self._sooner = asyncio.Event()
        self._seen = _identity(path)  # before it is read: what is written meanwhile is another file
        self.keys = ApiKeys(read_keys(path))

    def look_now(self) -> None:
        """Read it again, changed or not."""
        self._seen = None
        self._sooner.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._sooner.wait()
            except TimeoutError:
                pass
            self._sooner.clear()
            await self.look()

    async def look(self) -> None:
        """Read the file if it is another than before. Off the loop: it may lie on a file system that takes its time."""
        seen = await asyncio.to_thread(_identity, self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            records = await asyncio.to_thread(read_keys, self._path)
        except NoKey:
            self.keys.replace(())
            log.error("the key file holds no key; nobody comes in", extra={"file": str(self._path)})
            self._changed("empty")
        except TreadleError as error:
            log.error("the key file cannot be read again; the keys stay as they were", extra={"reason": str(error)})
            self._changed("failed")
        else:
            self.keys.replace(records)
            log.info("keys read again", extra={"file": str(self._path), "keys": len(records)})
            self._changed("read")


@asynccontextmanager
async def followed_keys(path: Path | None, changed: Callable[[str], None]) -> AsyncIterator[ApiKeys]:
    """The keys of a file, followed while the body runs, at once on SIGHUP; of no file: no key is needed.

    Raises WrongSetting before the body as `read_keys` does.
    """
    if path is None:
        yield ApiKeys(None)
        return
    file, loop = KeyFile(path, changed), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, file.look_now)
    following = asyncio.create_task(file.run())
    try:
        yield file.keys
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        following.cancel()
        await asyncio.wait({following})


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode)


def _check_mode(path: Path, plain: list[int]) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:  # taken away since it was read
        raise WrongSetting(f"{SETTING}: cannot read {path}: {error}") from error
    if mode & stat.S_IWOTH:
        raise WrongSetting(f"{SETTING}: anybody may write {path}, and so let themselves in: chmod o-w {path}")
    if plain and mode & stat.S_IROTH:
        raise WrongSetting(
            f"{SETTING}: {path} line {plain[0]}: a key that anybody of this machine may read: chmod o-r {path}, "
            "or put digests there: treadle key hash FILE"
        )


def _record(line: KeyLine, path: Path) -> KeyRecord:
    try:
        return record_of(line.digest, line.options)
    except InvalidArgument as error:
        raise WrongSetting(f"{SETTING}: {path} line {line.number}: {error}") from error
