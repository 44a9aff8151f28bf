"""The pool of the benchmark, with the paper's kind of table: random rows for every request, computed and not added."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle.client import Endpoint
from treadle.client.engram import EngramPool
from treadle.nn import demo_profile
from treadle_bench.serve.processes import HERE, Place, key_of, ready_process

LOAD_SECONDS_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Pool:
    """A running pool: its gRPC address, and the addresses of its native socket doors."""

    address: str
    doors: tuple[str, ...]


@contextmanager
def pool_with_table(model_dir: Path, key: Path, place: Place = HERE, *, mooncake: bool = False) -> Iterator[Pool]:
    """Run a pool at `place` with doors of all kinds, and load the table of the demo profile (two layers of about 102 MB)."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-serve-", dir="/dev/shm"))
    folder.chmod(0o750)
    argv = [*place.inside, sys.executable, "-m", "engram_pool", "--listen", f"{place.address}:0", "--metrics-listen"]
    argv += ["127.0.0.1:0", "--segment-dir", str(folder / "segments"), "--log-level", "warning", "--api-key-file", str(key)]
    argv += ["--socket-listen", f"{place.address}:0", "--keep-segments", "false"]
    argv += ["--mooncake-listen", f"{place.address}:0"] if mooncake else []
    try:
        with ready_process(argv, "the pool") as ready:
            address = str(ready["listen"])
            yield Pool(address, _loaded(address, key, model_dir))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _loaded(address: str, key: Path, model_dir: Path) -> tuple[str, ...]:
    template, token_map = demo_profile.smollm2_demo_template(model_dir / "tokenizer.json")
    with EngramPool(Endpoint(address, key_of(key), timeout_seconds=LOAD_SECONDS_MAX)) as pool:
        pool.load_random(template, token_map)
        return tuple(door.address for door in pool.describe(template.name).doors if door.transport == "socket")
