"""Whatever is dead, frozen or slow, every chat ends: pool and workers struck while answers are read and written.

A gateway, two workers with the embedded engine and a pool, all real. In each cell some chats begin, half of them streams; once they
are where the cell wants them, one process is killed, stopped, or run a fifth of the time, until all chats have ended. Then it is
healed, and the next cell begins when all is well.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from treadle.cli.supervisor import ServiceSpec
from treadle.client import Fabric
from treadle.contract import TreadleError
from treadle_bench.report import Goal
from treadle_loadtests.chats import DEGRADED, ERROR, HUNG, UNCLEAR, WHOLE, Chat
from treadle_loadtests.report import Report
from treadle_loadtests.stage import STOP_SECONDS, ScenarioFailed, Stage, child_environment, free_port
from treadle_loadtests.tiny_model import memory_template, write_tiny_model

POOL, STRUCK, OTHER, GATEWAY = "pool", "worker-1", "worker-2", "gateway"
TARGETS, FAULTS, PHASES, TRANSPORTS = ("pool", "worker"), ("dead", "frozen", "slow"), ("prefill", "decode"), ("mapped", "socket")
STOPPED_SECONDS, RUNNING_SECONDS = 0.2, 0.05  # of a slow process, in turns
DECODE_FACTOR = 2
PIECES_BEFORE = 3  # a chat that has so many is being decoded
WELL_SECONDS = 60.0  # within which all must be well again after a cell
READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of the matrix."""

    transport: str
    target: str
    fault: str
    phase: str

    @property
    def name(self) -> str:
        """What it is called in the report."""
        return f"{self.transport} {self.target} {self.fault} {self.phase}"


ALL_CELLS = tuple(Cell(*square) for square in product(TRANSPORTS, TARGETS, FAULTS, PHASES))
QUICK_CELLS = (
    Cell("socket", "pool", "frozen", "decode"), Cell("socket", "pool", "dead", "prefill"),
    Cell("socket", "worker", "frozen", "prefill"), Cell("socket", "worker", "frozen", "decode"),
    Cell("socket", "worker", "dead", "decode"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """How much.

    model:  a name or folder, "" a tiny one
    chats:  in each cell
    silence_seconds: of a worker that the gateway bears; more than the 3 s that a memory is waited for in vain, and a step
    tokens: of each answer; DECODE_FACTOR times as many where answers are struck, so that they are not over before
    """

    cells: tuple[Cell, ...] = ALL_CELLS
    model: str = ""
    chats: int = 4
    prompt_characters: int = 1500
    tokens: int = 200
    deadline_seconds: float = 40.0
    silence_seconds: float = 5.0


def plan_of(model: str, cells: tuple[Cell, ...]) -> Plan:
    """The plan for a model of that name or folder, "": the tiny one; a larger one takes seconds for what that does in a moment."""
    larger = Plan(cells, model, prompt_characters=300, tokens=40, deadline_seconds=120.0, silence_seconds=30.0)
    return larger if model else Plan(cells)


def run(plan: Plan) -> Report:
    """All cells of one transport, then of the next."""
    report = Report("faults", {"cells": len(plan.cells), "chats": plan.chats, "model": plan.model or "tiny", "workers": 2})
    matrix = Matrix(plan, report)
    for transport in dict.fromkeys(cell.transport for cell in plan.cells):
        stage = Stage(0, ())
        try:
            matrix.play(stage, transport)
        finally:
            stage.clear()
    matrix.judge()
    return report


@dataclass(slots=True)
class Matrix:
    """Plays cells and writes down how each chat ended."""

    plan: Plan
    report: Report
    ended: dict[Cell, list[Chat]] = field(default_factory=dict)
    stage: Stage = field(init=False)
    addresses: dict[str, str] = field(default_factory=dict)

    def play(self, stage: Stage, transport: str) -> None:
        """Start everything, play the cells of one transport, stop everything."""
        self.stage = stage
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in (STRUCK, OTHER, GATEWAY)}
        folder = self._model_folder()
        pool = stage.pool_spec(POOL, (POOL,))
        template, token_map = self._memory(folder)

        def load() -> None:
            with Fabric(engram=stage.pools[POOL]) as fabric:
                fabric.engram.load_random(template, token_map, seed=1)

        served = [*(self._worker_spec(name, folder, template.name, transport) for name in (STRUCK, OTHER)), self._gateway_spec()]
        stage.play([pool], load, served, lambda: self._cells([cell for cell in self.plan.cells if cell.transport == transport]))

    def judge(self) -> None:
        """Counts, times and goals of all cells."""
        for cell, chats in self.ended.items():
            self.report.times[cell.name] = [chat.seconds for chat in chats]
            ends = Counter(f"{chat.outcome} {chat.code or chat.because}".strip() for chat in chats)
            self.report.counts |= {f"{cell.name}: {end}": count for end, count in sorted(ends.items())}

        def count(outcome: str, *targets: str, transport: str = "") -> int:
            return sum(
                chat.outcome == outcome
                for cell, chats in self.ended.items()
                for chat in chats
                if cell.target in (targets or TARGETS) and transport in ("", cell.transport)
            )

        # a dead pool may be started again, and its rows be there, before a layer has waited in vain: only a frozen one stays away
        reached = [cell for cell in self.ended if (cell.target, cell.transport, cell.fault) == ("pool", "socket", "frozen")]
        bitten = sum(any(chat.outcome == DEGRADED for chat in self.ended[cell]) for cell in reached)
        broken = [cell for cell in self.ended if (cell.target, cell.phase) == ("worker", "decode") and cell.fault != "slow"]
        named = sum(any(chat.outcome == ERROR for chat in self.ended[cell]) for cell in broken)
        unread = [cell for cell in self.ended if (cell.target, cell.phase) == ("worker", "prefill")]
        lost = sum(chat.outcome == ERROR and not chat.pieces for cell in unread for chat in self.ended[cell])
        self.report.goals += [
            Goal("cells played", len(self.ended), len(self.plan.cells), at_least=True),
            Goal("hung chats", count(HUNG), 0),
            Goal("chats without a clear end", count(UNCLEAR), 0),
            Goal("errors although only the pool was struck", count(ERROR, "pool"), 0),
            Goal("errors although nothing had been answered", lost, 0),
            Goal("answers degraded although rows lay in the host's memory", count(DEGRADED, transport="mapped"), 0),
            Goal("cells of a frozen pool in which answers said so", bitten, len(reached), at_least=True),
            Goal("cells of a worker dead or frozen in its answers that ended with an error", named, len(broken), at_least=True),
        ]

    # -- what is started ------------------------------------------------------------------------------------------------------

    def _model_folder(self) -> Path:
        if not self.plan.model:
            return write_tiny_model(self.stage.folder / "tiny")
        from treadle.nn.model_folder import find_model_folder

        return find_model_folder(self.plan.model)[0]

    def _memory(self, folder: Path) -> tuple[Any, Any]:
        if not self.plan.model:
            return memory_template(folder)
        from treadle.nn.demo_profile import smollm2_demo_template

        return smollm2_demo_template(folder / "tokenizer.json")

    def _worker_spec(self, name: str, folder: Path, memory: str, transport: str) -> ServiceSpec:
        argv = (
            sys.executable, "-m", "inference_worker", "--model", str(folder), "--served-model-name", "model", "--engram-pool",
            self.stage.pools[POOL], "--engram-model", memory, "--engram-transport", transport, "--step-tokens-max", "16",
            "--context-tokens-max", "4096", "--prefix-cache-bytes-max", "0", "--log-level", "warning",
        )  # fmt: skip
        return self._spec(name, argv, metrics="127.0.0.1:0")

    def _gateway_spec(self) -> ServiceSpec:
        workers = ",".join(f"{name}={self.addresses[name]}" for name in (STRUCK, OTHER))
        argv = (
            sys.executable, "-m", "inference_gateway", "--worker", workers, "--worker-poll-seconds", "0.3",
            "--worker-first-piece-seconds-max", str(self.plan.silence_seconds), "--worker-idle-seconds-max", str(self.plan.silence_seconds),
            "--request-timeout-seconds", str(self.plan.deadline_seconds), "--log-level", "error",
        )  # fmt: skip
        return self._spec(GATEWAY, argv)

    def _spec(self, name: str, argv: tuple[str, ...], metrics: str = "") -> ServiceSpec:
        return ServiceSpec(
            name, argv, listen=self.addresses[name], metrics=metrics, ready_seconds=READY_SECONDS, drain_seconds=STOP_SECONDS,
            given_up=False, environment=child_environment(),
        )  # fmt: skip

    # -- what is played -------------------------------------------------------------------------------------------------------

    def _cells(self, cells: list[Cell]) -> None:
        for cell in cells:
            self._all_well()
            decode = cell.phase == "decode"
            tokens = self.plan.tokens * (DECODE_FACTOR if decode else 1)
            chats = [self._chat(tokens, stream=decode or bool(number % 2)) for number in range(self.plan.chats)]
            for chat in chats:
                chat.start()
            self._wait_for(cell.phase, chats)
            with self._struck(POOL if cell.target == "pool" else STRUCK, cell.fault):
                for chat in chats:
                    chat.join()
            self.ended[cell] = chats

    def _chat(self, tokens: int, *, stream: bool, characters: int | None = None) -> Chat:
        text = "".join(chr(97 + (number * 7) % 26) for number in range(characters or self.plan.prompt_characters))
        body = {
            "model": "model", "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "ignore_eos": True, "temperature": 0, "stream": stream,
        }  # fmt: skip
        return Chat(self.addresses[GATEWAY], body, self.plan.deadline_seconds)

    def _wait_for(self, phase: str, chats: list[Chat]) -> None:
        """Until the struck worker has begun a prompt, or every chat has begun its answer; or is over, which then counts as it is."""
        if phase == "prefill":
            self.stage.wait(lambda: self._busy(STRUCK) or all(chat.over for chat in chats), "a worker reads a prompt")
        else:
            begun = lambda: all(chat.over or chat.pieces >= PIECES_BEFORE for chat in chats)  # noqa: E731
            self.stage.wait(begun, "all chats are being answered")

    def _busy(self, name: str) -> bool:
        try:
            with Fabric(worker=self.addresses[name], timeout_seconds=1.0) as fabric:
                status = fabric.worker.status()
        except TreadleError:
            return False
        return status.requests_running + status.requests_waiting > 0

    @contextmanager
    def _struck(self, name: str, fault: str) -> Iterator[None]:
        """While the context runs, the process is dead, frozen or slow."""
        child = self.stage.service(name).child
        assert child is not None
        healed, beat = threading.Event(), threading.Thread(target=lambda: None)
        if fault == "dead":
            os.kill(child.pid, signal.SIGKILL)
        elif fault == "frozen":
            os.kill(child.pid, signal.SIGSTOP)
        else:
            beat = threading.Thread(target=_slow_down, args=(child.pid, healed), name="slow")
        beat.start()
        try:
            yield
        finally:
            healed.set()
            beat.join()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGCONT)

    def _all_well(self) -> None:
        """Every process serves, the gateway sends to both workers, and answers are whole."""
        for name in (POOL, STRUCK, OTHER, GATEWAY):
            self.stage.wait(lambda name=name: self.stage.ready(name), f"{name} serves", WELL_SECONDS)  # type: ignore[misc]
        begun = time.monotonic()
        while not self._both_take_requests() or not self._answers_are_whole():
            if time.monotonic() - begun > WELL_SECONDS:
                raise ScenarioFailed(f"after {WELL_SECONDS:.0f} s still not: whole answers from both workers")
            self.stage.pause(0.1)

    def _both_take_requests(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.addresses[GATEWAY]}/metrics", timeout=5) as page:
                lines = page.read().decode().splitlines()
        except OSError:
            return False
        closed = [line for line in lines if line.startswith("treadle_gateway_breaker_state{") and line.endswith(" 0.0")]
        ready = [line for line in lines if line.startswith("treadle_gateway_worker_state{") and 'state="ready"' in line]
        idle = not self._busy(STRUCK) and not self._busy(OTHER)
        return len(closed) == 2 and sum(line.endswith(" 1.0") for line in ready) == 2 and idle

    def _answers_are_whole(self) -> bool:
        """Two short chats at once: one for each worker."""
        chats = [self._chat(2, stream=False, characters=8) for _ in range(2)]
        for chat in chats:
            chat.start()
        for chat in chats:
            chat.join()
        return all(chat.outcome == WHOLE for chat in chats)


def _slow_down(pid: int, healed: threading.Event) -> None:
    with suppress(ProcessLookupError):
        while not healed.is_set():
            os.kill(pid, signal.SIGSTOP)
            healed.wait(STOPPED_SECONDS)
            os.kill(pid, signal.SIGCONT)
            healed.wait(RUNNING_SECONDS)
