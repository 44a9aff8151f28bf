"""One real pool and one store of long prefixes, one worker of each engine over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_processes import FREE, Process, started, started_pool, worker_argv

from treadle.client.endpoint import Endpoint
from treadle.client.worker import Worker
from treadle.nn import model_fetch


@pytest.fixture(scope="session")
def folder() -> Path:
    return model_fetch.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def pool(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with started_pool(folder, tmp_path_factory.mktemp("pool") / "segments") as running:
        yield running


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with started("asm_store", "--data-dir", str(tmp_path_factory.mktemp("store")), *FREE) as running:
        yield running


@pytest.fixture(scope="session")
def vllm_process(folder: Path, pool: Process, store: Process) -> Iterator[Process]:
    with started(*worker_argv(folder, pool.listen, "vllm", "--asm-store", store.listen)) as running:
        yield running


@pytest.fixture(scope="session")
def embedded_process(folder: Path, pool: Process, store: Process) -> Iterator[Process]:
    with started(*worker_argv(folder, pool.listen, "embedded", "--asm-store", store.listen)) as running:
        yield running


@pytest.fixture
def vllm(vllm_process: Process) -> Iterator[Worker]:
    with Worker(Endpoint(vllm_process.listen)) as worker:
        yield worker


@pytest.fixture
def embedded(embedded_process: Process) -> Iterator[Worker]:
    with Worker(Endpoint(embedded_process.listen)) as worker:
        yield worker
