"""Whatever is dead, frozen or slow, every chat ends: pool, workers and store struck while prompts are read and answers written.

A gateway, two workers with the embedded engine, a pool and a store of long prefixes, all real. In each cell some chats begin, half of
them streams; once they are where the cell wants them, one process is killed, stopped, or run a fifth of the time, until all chats have
ended. Then it is healed, and the next cell begins when all is well. Where it is the store, half of the chats have a prefix that is open,
and more begin after the blow: behind it, without one, and behind a prefix that nobody has opened yet.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.cli.supervisor import ServiceSpec
from treadle.client import Fabric
from treadle.contract import TreadleError
from treadle.inference.v1.worker_pb2 import StatusResponse
from treadle_loadtests.chats import WHOLE, Chat
from treadle_loadtests.fault_cells import ALL_CELLS, POOL, STORE, WORKER, Cell
from treadle_loadtests.fault_goals import INSISTING, OPEN_PREFIX, Ended
from treadle_loadtests.report import Report
from treadle_loadtests.stage import STOP_SECONDS, ScenarioFailed, Stage, child_environment, free_port
from treadle_loadtests.tiny_model import memory_template, write_tiny_model
from treadle_loadtests.tiny_prefix import model_of, write_tiny_prefix

STRUCK, OTHER, GATEWAY = "worker-1", "worker-2", "gateway"
PROCESSES = {POOL: POOL, WORKER: STRUCK, STORE: STORE}  # whom a blow to a target hits
STOPPED_SECONDS, RUNNING_SECONDS = 0.2, 0.05  # of a slow process, in turns
DECODE_FACTOR = 2
BLOWS_MAX = 3  # of a cell, each with answers twice as long
PIECES_BEFORE = 3  # a chat that has so many is being decoded
SHORT_CHARACTERS = 200
WELL_SECONDS = 60.0  # within which all must be well again after a cell
READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much.

    model:  a name or folder, "" a tiny one
    chats:  that begin before the blow of a cell
    silence_seconds: of a worker that the gateway bears; more than the 3 s that a memory is waited for in vain, and a step. So soon
                     a chat must be told that its prefix cannot be had, too
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
    matrix = Matrix(plan)
    for transport in dict.fromkeys(cell.transport for cell in plan.cells):
        stage = Stage(0, ())
        try:
            matrix.play(stage, transport)
        finally:
            stage.clear()
    Ended(matrix.ended).judge(report, len(plan.cells), plan.silence_seconds)
    return report


@dataclass(slots=True)
class Matrix:
    """Plays cells and keeps how each chat ended."""

    plan: Plan
    ended: dict[Cell, list[Chat]] = field(default_factory=dict)
    stage: Stage = field(init=False)
    addresses: dict[str, str] = field(default_factory=dict)

    def play(self, stage: Stage, transport: str) -> None:
        """Start everything, play the cells of one transport, stop everything."""
        self.stage = stage
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in (STRUCK, OTHER, GATEWAY, STORE)}
        folder = self._model_folder()
        cells = [cell for cell in self.plan.cells if cell.transport == transport]
        template, token_map = self._memory(folder)

        def load() -> None:
            with Fabric(engram=stage.pools[POOL]) as fabric:
                fabric.engram.load_random(template, token_map, seed=1)
            self._publish(folder, [OPEN_PREFIX, *(cell.new_prefix for cell in cells if cell.target == STORE)])

        kept = [stage.pool_spec(POOL, (POOL,)), self._store_spec()]
        served = [*(self._worker_spec(name, folder, template.name, transport) for name in (STRUCK, OTHER)), self._gateway_spec()]
        stage.play(kept, load, served, lambda: self._cells(cells))

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

    def _publish(self, folder: Path, names: list[str]) -> None:
        """Each name a dictionary for the model in `folder`."""
        model = model_of(folder)
        with Fabric(asm=self.addresses[STORE]) as fabric:
            for name in names:
                fabric.asm.publish(write_tiny_prefix(self.stage.folder / "prefixes" / name, name, model))

    def _store_spec(self) -> ServiceSpec:
        argv = (sys.executable, "-m", "asm_store", "--data-dir", str(self.stage.folder / "asm"), "--log-level", "error")
        return self._spec(STORE, argv, metrics="127.0.0.1:0")

    def _worker_spec(self, name: str, folder: Path, memory: str, transport: str) -> ServiceSpec:
        argv = (
            sys.executable, "-m", "inference_worker", "--model", str(folder), "--served-model-name", "model", "--engram-pool",
            self.stage.pools[POOL], "--engram-model", memory, "--engram-transport", transport, "--asm-store", self.addresses[STORE],
            "--step-tokens-max", "16", "--context-tokens-max", "4096", "--prefix-cache-bytes-max", "0", "--log-level", "warning",
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
            for longer in range(1 if cell.target == STORE else BLOWS_MAX):  # a store's new prefix is new only once
                self._until_well(self._serves_whole_answers, "whole answers from both workers")
                if cell.target == STORE:
                    self._until_well(lambda: self._open_at_both(OPEN_PREFIX), "a prefix that both workers have open")
                self.ended[cell], under_way = self._blow(cell, self.plan.tokens << longer)
                if under_way:
                    break
            if cell.target == STORE:  # what could not be had is had now
                self._until_well(lambda name=cell.new_prefix: self._open_at_both(name), "the prefix asked for")  # type: ignore[misc]  # of this turn of the loop

    def _blow(self, cell: Cell, tokens: int) -> tuple[list[Chat], bool]:
        """The chats of a cell, all over; and whether any was under way when it was struck: a blow that comes too late says nothing."""
        before, after = self._chats_before(cell, tokens), self._chats_after(cell)
        for chat in before:
            chat.start()
        self._wait_for(cell.phase, before)
        with self._struck(PROCESSES[cell.target], cell.fault):
            under_way = not all(chat.over for chat in before)
            for chat in after:
                chat.start()
            for chat in (*before, *after):
                chat.join()
        return [*before, *after], under_way

    def _chats_before(self, cell: Cell, tokens: int) -> list[Chat]:
        decode = cell.phase == "decode"
        tokens *= DECODE_FACTOR if decode else 1
        asked = [{"prefix": OPEN_PREFIX} if cell.target == STORE and number // 2 % 2 else {} for number in range(self.plan.chats)]
        return [self._chat(tokens, stream=decode or bool(number % 2), treadle=each) for number, each in enumerate(asked)]

    def _chats_after(self, cell: Cell) -> list[Chat]:
        """Those that begin while the store is struck, with short prompts: how long they wait for it is what is looked at."""
        if cell.target != STORE:
            return []
        new = {"prefix": cell.new_prefix}
        asked: list[dict[str, Any]] = [new, new | {"policy": INSISTING}, {"prefix": OPEN_PREFIX}, {}]
        return [
            self._chat(self.plan.tokens, stream=bool(number % 2), characters=SHORT_CHARACTERS, treadle=each)
            for number, each in enumerate(asked)
        ]

    def _chat(self, tokens: int, *, stream: bool, characters: int | None = None, treadle: Mapping[str, Any] | None = None) -> Chat:
        text = "".join(chr(97 + (number * 7) % 26) for number in range(characters or self.plan.prompt_characters))
        body = {
            "model": "model", "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "ignore_eos": True, "temperature": 0, "stream": stream, "treadle": dict(treadle or {}),
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
        status = self._status(name)
        return status is not None and status.requests_running + status.requests_waiting > 0

    def _status(self, name: str) -> StatusResponse | None:
        """What a worker says of itself; None where it does not answer."""
        try:
            with Fabric(worker=self.addresses[name], timeout_seconds=1.0) as fabric:
                return fabric.worker.status()
        except TreadleError:
            return None

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

    def _until_well(self, well: Callable[[], bool], what: str) -> None:
        """Until every process serves and `well` holds. Raises ScenarioFailed after WELL_SECONDS."""
        for name in (POOL, STORE, STRUCK, OTHER, GATEWAY):
            self.stage.wait(lambda name=name: self.stage.ready(name), f"{name} serves", WELL_SECONDS)  # type: ignore[misc]  # of this turn of the loop
        begun = time.monotonic()
        while not well():
            if time.monotonic() - begun > WELL_SECONDS:
                raise ScenarioFailed(f"after {WELL_SECONDS:.0f} s still not: {what}")
            self.stage.pause(0.1)

    def _serves_whole_answers(self) -> bool:
        return self._both_take_requests() and self._answers_are_whole()

    def _open_at_both(self, prefix: str) -> bool:
        """Answers behind it are whole, and it is open in both workers."""
        return self._answers_are_whole({"prefix": prefix}) and all(self._has_open(name, prefix) for name in (STRUCK, OTHER))

    def _has_open(self, name: str, prefix: str) -> bool:
        status = self._status(name)
        return status is not None and any(each.open for each in status.prefixes if each.name == prefix)

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

    def _answers_are_whole(self, treadle: Mapping[str, Any] | None = None) -> bool:
        """Two short chats at once: one for each worker."""
        chats = [self._chat(2, stream=False, characters=8, treadle=treadle) for _ in range(2)]
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
