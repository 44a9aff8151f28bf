"""`treadle bench cuda`: rows from the host's one copy straight to a GPU, against a plain copy of as many bytes from pinned memory.

Both cross the same bus. The third variant is what is done without this path: the host gathers into pinned memory, which is then copied.
Not run so far: no machine of ours has a GPU.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import numpy as np
import torch

from treadle.client import Endpoint
from treadle.client.engram import EngramHandle, EngramPool
from treadle.contract import RowOutOfRange
from treadle.contract.families import demo_model
from treadle.contract.row_layout import RowLayout
from treadle.cuda import DeviceRows, device_count
from treadle_bench.pool_process import huge_folder, pool_process
from treadle_bench.report import Goal, Row, interleave, rows_of

NAME, IDS, PRIME_BASE, PRIME_BASE_QUICK = "cuda", 4096, 500_000, 50_000  # 2.5 GB and 250 MB a layer
TOKENS, TOKENS_QUICK = (1, 16, 256, 4096), (16, 256)
ROUNDS, ROUNDS_QUICK, WARM_ROUNDS = 200, 20, 5
SHARE_GOAL = 0.5  # of the plain copy's bytes a second, at the most tokens: rows are 320 bytes, a copy is one piece


def measure(*, quick: bool) -> tuple[list[Row], list[Goal], list[str]]:
    """Microseconds of a layer's rows by the side stream, by a plain pinned copy, and by way of the host. Raises Unavailable without a GPU."""
    device_count()
    rows: list[Row] = []
    with huge_folder() as folder, pool_process(folder) as pool, EngramPool(Endpoint(pool.address)) as client:
        _load(client, PRIME_BASE_QUICK if quick else PRIME_BASE)
        with client.open(NAME, transport="mapped") as handle:
            begun = time.perf_counter()
            with DeviceRows.register(handle) as device:
                notes = [f"{torch.cuda.get_device_name()}; tables registered in {time.perf_counter() - begun:.1f} s"]
                for tokens in TOKENS_QUICK if quick else TOKENS:
                    rows += _measure(handle, device, tokens, ROUNDS_QUICK if quick else ROUNDS)
    notes += [f"{row.name}, {row.params['tokens']} tokens: {row.params['bytes'] / row.median / 1e3:.2f} GB/s" for row in rows]
    last = next(row for row in reversed(rows) if row.name == "gather")
    share = 1 / last.ratio if last.ratio else 0.0
    return rows, [Goal("bytes a second, of a plain pinned copy's", share, SHARE_GOAL, at_least=True)], notes


def _load(client: EngramPool, prime_base: int) -> None:
    token_map = np.arange(IDS, dtype=np.int32)
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    model = demo_model(
        NAME,
        layers=(2, 15),
        token_map=digest,
        compressed_vocab_size=IDS,
        pad_id=2,
        prime_base=prime_base,
        row=RowLayout(320, 160, "bf16"),
    )
    client.load_random(model, token_map)


def _measure(handle: EngramHandle, device: DeviceRows, tokens: int, rounds: int) -> list[Row]:
    model, layer = handle.model, handle.layers[0]
    shape = (tokens, model.columns, model.row.bytes)
    sets = np.random.default_rng(0).integers(0, model.rows_hashed(layer), (64, tokens, model.columns))
    on_device = torch.from_numpy(sets).to(device.device)
    pinned = torch.empty(shape, dtype=torch.uint8).pin_memory()
    target = torch.empty(shape, dtype=torch.uint8, device=device.device)
    _check(handle, device, layer, sets[0])

    def gather(number: int) -> None:
        device.gather(layer, on_device[number % len(sets)]).wait()

    def copy(number: int) -> None:
        target.copy_(pinned, non_blocking=True)

    def by_host(number: int) -> None:
        handle.gather(layer, sets[number % len(sets)], pinned.numpy())
        target.copy_(pinned, non_blocking=True)

    variants = {"gather": gather, "pinned copy": copy, "host, then copy": by_host}
    timed = {name: _timed(act) for name, act in variants.items()}
    for number in range(WARM_ROUNDS):
        for act in timed.values():
            act(number)
    params = {"tokens": tokens, "bytes": pinned.numel()}
    return rows_of(interleave(timed, rounds, what=f"{tokens} tokens"), params, "us", "pinned copy")


def _timed(act: Callable[[int], None]) -> Callable[[int], float]:
    """Microseconds until the rows are on the device, launch and host work included."""

    def run(number: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter_ns()
        act(number)
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - begun) / 1e3

    return run


def _check(handle: EngramHandle, device: DeviceRows, layer: int, ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
    """Bytes are compared before they are timed."""
    result = device.gather(layer, ids)
    rows = result.wait().cpu().numpy()
    result.check()
    if not np.array_equal(rows, handle.gather(layer, ids)):
        raise RowOutOfRange("the device's rows are not the host's: nothing is timed")
