"""Supervision, with small real children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from treadle.cli import process_group
from treadle.cli.child import TAIL_LINES
from treadle.cli.events import Event
from treadle.cli.process_group import TRACKER_SECONDS_MAX, kill_group, shared_memory_of
from treadle.cli.process_mark import ProcessMark
from treadle.cli.restarts import RestartPolicy
from treadle.cli.supervisor import GaveUp, JobSpec, Service, ServiceSpec, StartFailed, StopRequested, Supervisor

SERVICE = """
import json, os, signal, socket, sys, time
say = lambda text: print(text, file=sys.stderr, flush=True)
address = sys.argv[sys.argv.index("--listen") + 1]
server = socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
listen = "127.0.0.1:%d" % server.getsockname()[1]
def ready():
    print(json.dumps({"ready": True, "service": "x", "listen": listen, "metrics": "", "pid": os.getpid(), "version": "1"}), flush=True)
"""
SERVES = SERVICE + "ready()\nsignal.pause()"
IGNORES_SIGTERM = SERVICE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\nwhile True: signal.pause()"
NEVER_READY = SERVICE + "say('loading for ever')\nsignal.pause()"
DIES = SERVICE + "[say('line %d' % n) for n in range(50)]\nsys.exit(3)"
NOISE_THEN_READY = SERVICE + "print('{\"ready\": false}\\n{not json}\\n[1]')\nready()\nsignal.pause()"


class Stage:
    """A supervisor and what it told."""

    def __init__(self, logs: Path) -> None:
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = lambda event: None
        self.supervisor = Supervisor(
            logs, self._hear, lambda: RestartPolicy(2, backoff_first_seconds=0.01, backoff_max_seconds=0.05)
        )

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def told(self, kind: str) -> list[str]:
        return [event.name for event in self.events if event.kind == kind]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "logs")
    yield stage
    stage.supervisor.close()


def spec(script: str, service: str = "pool", ready_seconds: float = 20.0, drain_seconds: float = 20.0) -> ServiceSpec:
    return ServiceSpec(
        service, (sys.executable, "-c", script), "127.0.0.1:0", ready_seconds=ready_seconds, drain_seconds=drain_seconds
    )  # fmt: skip


def job(script: str, seconds_max: float = 20.0) -> JobSpec:
    return JobSpec("load", (sys.executable, "-c", script), seconds_max)


def pid_of(service: Service) -> int:
    assert service.child is not None
    return service.child.pid


def test_a_service_is_ready_on_the_address_that_it_names_itself(stage: Stage) -> None:
    service = stage.supervisor.start(spec(SERVES))
    assert service.stage == "ready"
    assert service.listen.startswith("127.0.0.1:")
    assert not service.listen.endswith(":0")
    assert stage.told("ready") == ["pool"]


def test_lines_that_only_look_like_a_ready_line_are_passed_over(stage: Stage) -> None:
    assert stage.supervisor.start(spec(NOISE_THEN_READY)).stage == "ready"


def test_a_child_has_a_session_of_its_own_so_that_ctrl_c_reaches_only_us(stage: Stage) -> None:
    pid = pid_of(stage.supervisor.start(spec(SERVES)))
    assert os.getsid(pid) == pid


def test_a_child_that_dies_before_it_is_ready_is_told_with_its_last_lines(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"pool did not become ready \(exit code 3\)") as raised:
        stage.supervisor.start(spec(DIES))
    assert "line 49" in str(raised.value)
    assert f"line {50 - TAIL_LINES - 1}\n" not in str(raised.value)
    assert "line 0\n" in (tmp_path / "logs" / "pool.log").read_text()


def test_a_child_that_is_never_ready_fails_after_the_limit(stage: Stage) -> None:
    with pytest.raises(StartFailed, match="killed by SIGKILL"):
        stage.supervisor.start(spec(NEVER_READY, ready_seconds=0.5))
    assert stage.told("killed") == ["pool"]


def test_a_service_that_dies_while_another_one_starts_fails_the_start(stage: Stage) -> None:
    os.kill(pid_of(stage.supervisor.start(spec(SERVES))), signal.SIGKILL)
    with pytest.raises(StartFailed, match=r"pool stopped \(killed by SIGKILL\)"):
        stage.supervisor.start(spec(NEVER_READY, "worker"))


def test_a_killed_child_comes_back_on_the_same_address(stage: Stage) -> None:
    service = stage.supervisor.start(spec(SERVES))
    address, pid = service.listen, pid_of(service)
    os.kill(pid, signal.SIGKILL)
    stage.on_event = lambda event: stage.supervisor.request_stop() if event.kind == "ready" else None
    stage.supervisor.watch()
    assert service.listen == address
    assert pid_of(service) != pid
    assert service.restarts == 1
    assert stage.told("died") == ["pool"]


def test_a_child_that_dies_again_and_again_is_given_up(stage: Stage) -> None:
    stage.supervisor.start(spec(SERVES))
    stage.on_event = lambda event: (
        os.kill(pid_of(stage.supervisor.services["pool"]), signal.SIGKILL) if event.kind == "ready" else None
    )
    os.kill(pid_of(stage.supervisor.services["pool"]), signal.SIGKILL)
    with pytest.raises(GaveUp, match="pool died more than 2 times in 120 s"):
        stage.supervisor.watch()


def test_a_service_that_is_not_given_up_is_failing_until_it_is_ready_again(stage: Stage) -> None:
    pool = stage.supervisor.start(replace(spec(SERVES), given_up=False))
    worker = stage.supervisor.start(spec(SERVES, "worker"))
    seen: list[str] = []

    def on_event(event: Event) -> None:
        seen.append(f"{event.kind} {pool.shown_stage}")
        if event.kind == "ready" and len(stage.told("died")) < 5:
            os.kill(pid_of(pool), signal.SIGKILL)
        elif event.kind == "ready":
            stage.supervisor.request_stop()

    stage.on_event = on_event
    os.kill(pid_of(pool), signal.SIGKILL)
    stage.supervisor.watch()
    assert seen.count("died backoff") == 2  # the limit of these tests
    assert seen.count("died failing") == seen.count("starting failing") == 3
    assert pool.shown_stage == "ready"
    died = [event for event in stage.events if event.kind == "died"]
    assert (died[-1].seconds, worker.restarts) == (0.05, 0)
    assert "died more than 2 times in 120 s; it starts again" in died[-1].text


def test_backoff_grows_up_to_its_limit_and_old_deaths_are_forgiven() -> None:
    policy = RestartPolicy(restarts_max=4, window_seconds=60.0, backoff_first_seconds=1.0, backoff_max_seconds=3.0)
    assert [policy.delay_after_death(now) for now in (0.0, 1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0, 3.0]
    assert policy.delay_after_death(4.0) is None
    assert policy.delay_after_death(64.5) == 1.0


def test_services_are_drained_in_the_order_that_is_asked_for(stage: Stage) -> None:
    for name in ("pool", "worker", "gateway", "other"):
        stage.supervisor.start(spec(SERVES, name))
    stage.supervisor.drain(("gateway", "worker", "pool"))
    assert stage.told("stopped") == ["other", "gateway", "worker", "pool"]
    assert not stage.told("killed")


def test_services_that_are_drained_together_are_asked_before_any_is_waited_for(stage: Stage) -> None:
    for name in ("pool", "worker", "worker-2", "worker-3", "gateway"):
        stage.supervisor.start(spec(IGNORES_SIGTERM, name, drain_seconds=0.5) if "worker" in name else spec(SERVES, name))
    stage.events.clear()
    stage.supervisor.drain(("gateway", ("worker", "worker-2", "worker-3", "worker-4"), "pool"))
    seen = [f"{event.name} {event.kind}" for event in stage.events]
    workers = ("worker", "worker-2", "worker-3")
    asked = seen.index("worker draining")
    assert seen[asked : asked + 3] == [f"{name} draining" for name in workers]
    assert stage.told("stopped") == ["gateway", *workers, "pool"]
    assert stage.told("killed") == list(workers)


def test_a_child_that_ignores_the_request_is_killed_after_the_limit(stage: Stage) -> None:
    service = stage.supervisor.start(spec(IGNORES_SIGTERM, drain_seconds=0.3))
    stage.supervisor.drain(())
    assert service.child is not None
    assert service.child.returncode == -signal.SIGKILL
    assert stage.told("killed") == ["pool"]


def test_a_second_request_to_stop_ends_the_patience(stage: Stage) -> None:
    stage.supervisor.start(spec(IGNORES_SIGTERM))
    stage.supervisor.request_stop()
    stage.on_event = lambda event: stage.supervisor.request_stop() if event.kind == "draining" else None
    stage.supervisor.drain(())
    assert stage.told("killed") == ["pool"]


def test_a_request_to_stop_interrupts_a_start_and_a_job(stage: Stage) -> None:
    stage.on_event = lambda event: stage.supervisor.request_stop() if event.kind == "starting" else None
    with pytest.raises(StopRequested):
        stage.supervisor.start(spec(NEVER_READY))
    with pytest.raises(StopRequested):
        stage.supervisor.run(job("import time; time.sleep(60)"))


def test_sigterm_is_a_request_to_stop_and_the_handler_before_comes_back(stage: Stage) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stage.supervisor.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        stage.supervisor.watch()
    assert stage.supervisor.stop_requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_gives_its_standard_output_and_tells_its_progress(stage: Stage, tmp_path: Path) -> None:
    output = stage.supervisor.run(job("import sys; print('half way', file=sys.stderr, flush=True); print('{\"a\": 1}')"))
    assert output == b'{"a": 1}'
    assert "half way" in [event.text for event in stage.events if event.kind == "progress"]
    assert (tmp_path / "logs" / "load.log").read_text() == "half way\n"


def test_a_job_that_fails_is_told_with_its_last_lines(stage: Stage) -> None:
    with pytest.raises(StartFailed, match=r"load failed \(exit code 1\)(?s:.*)no such table"):
        stage.supervisor.run(job("raise SystemExit('no such table')"))


def test_a_job_that_takes_too_long_is_killed(stage: Stage) -> None:
    with pytest.raises(StartFailed, match="load took longer than 0 s"):
        stage.supervisor.run(job("import time; time.sleep(60)", seconds_max=0.2))


def test_a_job_may_not_print_without_end(stage: Stage) -> None:
    with pytest.raises(StartFailed, match="printed more than"):
        stage.supervisor.run(job("while True: print('x' * 1000)"))


def test_a_service_that_dies_during_a_job_fails_the_job(stage: Stage) -> None:
    os.kill(pid_of(stage.supervisor.start(spec(SERVES))), signal.SIGKILL)
    with pytest.raises(StartFailed, match="pool stopped"):
        stage.supervisor.run(job("import time; time.sleep(60)"))


def test_what_a_dead_child_had_started_dies_with_it(stage: Stage, tmp_path: Path) -> None:
    grandchild = tmp_path / "pid"
    starts_one = f"""
        import subprocess, sys
        open({str(grandchild)!r}, "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
    """
    service = stage.supervisor.start(spec(SERVICE + textwrap.dedent(starts_one) + "ready()\nsignal.pause()"))
    mark = ProcessMark.of(int(grandchild.read_text()))
    os.kill(pid_of(service), signal.SIGKILL)
    stage.on_event = lambda event: stage.supervisor.request_stop() if event.kind == "died" else None
    stage.supervisor.watch()
    assert mark.wait_gone(10.0)


@pytest.mark.parametrize("end", ["it is killed", "it ignores SIGTERM until it is killed"])
def test_what_a_dead_child_had_shared_is_gone_with_it(stage: Stage, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "TRACKER_SECONDS_MAX", 20.0)  # what a tracker needs on a machine that stalls
    shares = """
        from multiprocessing import shared_memory
        shared = shared_memory.SharedMemory(create=True, size=4096)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready()
        while True: signal.pause()
    """
    service = stage.supervisor.start(spec(SERVICE + textwrap.dedent(shares), drain_seconds=0.1))
    (file,) = shared_memory_of([pid_of(service)])
    assert file.name.startswith("psm_")
    if end == "it is killed":
        os.kill(pid_of(service), signal.SIGKILL)
        stage.on_event = lambda event: stage.supervisor.request_stop() if event.kind == "died" else None
        stage.supervisor.watch()
    else:
        stage.supervisor.drain(["pool"])
    assert not file.exists()


def test_a_tracker_that_does_not_end_is_waited_for_without_reading_proc_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    listings: list[list[int]] = []
    pids = psutil.pids

    def listed() -> list[int]:
        listings.append(pids())
        return listings[-1]

    monkeypatch.setattr(psutil, "pids", listed)
    hangs = (sys.executable, "-c", "import signal; signal.pause()", "multiprocessing.resource_tracker")
    with subprocess.Popen(hangs, start_new_session=True) as process:
        mark = ProcessMark.of(process.pid)
        began = time.monotonic()
        kill_group(process.pid)
        assert mark.wait_gone(10.0)
        assert time.monotonic() - began >= TRACKER_SECONDS_MAX
    assert len(listings) <= 10


def test_waiting_for_something_outside_has_a_limit(stage: Stage) -> None:
    answers = iter([False, False, True])
    stage.supervisor.wait_until("gateway", "a worker", lambda: next(answers), 20.0)
    with pytest.raises(StartFailed, match="gateway waited 0 s for a worker"):
        stage.supervisor.wait_until("gateway", "a worker", lambda: False, 0.2)


def test_kill_minus_nine_of_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    program = f"""
        import sys
        from pathlib import Path
        from treadle.cli.supervisor import ServiceSpec, Supervisor
        supervisor = Supervisor(Path({str(tmp_path)!r}), lambda event: None)
        service = supervisor.start(ServiceSpec("pool", (sys.executable, "-c", {SERVES!r}), "127.0.0.1:0"))
        print(service.child.pid, flush=True)
        supervisor.watch()
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        mark = ProcessMark.of(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    assert mark.wait_gone(10.0)


def test_a_mark_does_not_mean_a_later_process_with_the_same_pid() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        mark = ProcessMark.of(process.pid)
        other = replace(mark, created_at_seconds=mark.created_at_seconds - 3600)
        assert mark.alive()
        assert not other.alive()
        assert not other.send(signal.SIGKILL)
        assert other.wait_gone(0.0)
        assert not mark.wait_gone(0.0)
        assert mark.send(signal.SIGKILL)
        assert mark.wait_gone(10.0)
        assert not mark.alive()  # a zombie by now
    assert not mark.send(signal.SIGKILL)
    with pytest.raises(psutil.NoSuchProcess):
        ProcessMark.of(process.pid)


def test_the_supervisor_sleeps_while_nothing_happens(stage: Stage) -> None:
    stage.supervisor.start(spec(SERVES))
    before, started = time.process_time(), time.monotonic()
    with pytest.raises(StartFailed):
        stage.supervisor.wait_until("x", "nothing", lambda: False, 0.5)
    assert time.process_time() - before < 0.5 * (time.monotonic() - started)
