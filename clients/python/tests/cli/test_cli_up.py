"""A fabric of fake services comes up, is looked at, loses a service, and goes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from treadle.client import Fabric
from treadle.contract.errors import AccessDenied, NotFound

SERVICES = ("engram-pool", "asm-store", "inference-worker", "inference-gateway")
FREE = ("--gateway-port", "0", "--port-base", "0")
FOLDER = (*FREE, "--model", "./model")  # which saves the fetch


# A supervisor without tethers: passes on what its child says, and hears no SIGTERM.
LEADER = "child = subprocess.Popen(sys.argv[1:], start_new_session=True)\nwhile True: signal.pause()"
# A service that starts something: tells both numbers.
STARTS_ONE = "import os, signal, subprocess; print(os.getpid(), subprocess.Popen(['sleep', '600']).pid, flush=True); signal.pause()"


def marks_of(cli: Any) -> list[Any]:
    return [cli.process(service) for service in SERVICES]


def stopped(cli: Any) -> list[str]:
    """Services in the order in which the supervisor's log says that they stopped."""
    lines = (cli.home / "run" / "logs" / "supervisor.log").read_text().splitlines()
    return [line.split()[2] for line in lines if line.endswith(" stopped")]


def kill_again_and_again(cli: Any, wait_for: Callable[..., Any], service: str, times: int) -> None:
    """Kill a service each time that it has a process."""
    for _ in range(times):
        mark = wait_for(lambda: (mark := cli.process(service)) and mark.alive() and mark, f"a process of {service}")
        mark.send(signal.SIGKILL)
        assert mark.wait_gone(10.0)


def finish(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()  # nothing, once it has ended
    return process.returncode, out, err


def test_a_detached_fabric_comes_up_is_seen_answers_and_goes(cli: Any) -> None:
    up = json.loads(cli("up", "--detach", "--json", *FREE).stdout)
    marks = marks_of(cli)
    assert all(mark.alive() for mark in marks)
    assert up["model"] == "fake-135m"
    assert [record["service"] for record in up["services"]] == list(SERVICES)
    assert Path(up["segment_dir"], "segment").exists()

    status = json.loads(cli("status", "--json").stdout)
    assert status["ready"] is True
    assert {service["service"]: service["ready"] for service in status["services"]} == dict.fromkeys(SERVICES, True)
    assert status["services"][0]["figures"]["table_bytes"] == 204 << 20
    text = cli("status").stdout
    assert "40 of 40" not in text
    assert "80 of 80 tickets in time" in text.replace("\n", " ")
    assert max(map(len, text.splitlines())) <= 80

    refused = cli("up", *FREE, code=1).stderr
    assert f"already up: pid {up['pid']}, {up['gateway_url']}" in refused

    assert cli("chat", "Is this a loom?").stdout == "Is this a loom? indeed\n"
    assert "inference-worker  | inference-worker begins" in cli("logs").stdout

    assert "stopped" in cli("down").stdout
    assert not any(mark.alive() for mark in marks)
    assert stopped(cli) == list(reversed(SERVICES))
    assert not cli.segments.exists()


def test_kill_minus_nine_of_up_leaves_no_process_and_down_frees_what_it_left(cli: Any) -> None:
    process = cli.start("up", *FOLDER)
    cli.wait_ready()
    marks = marks_of(cli)
    process.kill()
    process.communicate()
    assert all(mark.wait_gone(10.0) for mark in marks)
    assert (cli.segments / "segment").exists()
    assert json.loads(cli("status", "--json", code=1).stdout) == {"up": False, "ready": False, "services": []}
    assert "that a crashed run left" in cli("down").stdout
    assert not cli.segments.exists()
    assert cli.state() is None


def test_a_killed_service_is_back_on_its_address(cli: Any, wait_for: Callable[..., Any]) -> None:
    cli("up", "--detach", "--no-engram", "--no-asm", *FOLDER)
    before = cli.state()["services"]
    assert [record["service"] for record in before] == list(SERVICES[2:])
    cli.process("inference-worker").send(signal.SIGKILL)
    after = wait_for(
        lambda: (now := cli.state()["services"]) and now[0]["restarts"] == 1 and now[0]["stage"] == "ready" and now, "it is back"
    )
    assert [record["listen"] for record in after] == [record["listen"] for record in before]


def test_a_detached_fabric_that_gives_up_leaves_word_until_the_next_one_is_up(cli: Any, wait_for: Callable[..., Any]) -> None:
    cli.extra["FAKE_INFERENCE_GATEWAY"] = f"dies once {cli.home / 'struck'} is there"
    cli("up", "--detach", "--no-engram", *FOLDER)
    (cli.home / "struck").touch()
    wait_for(lambda: cli.state() is None, "the end of the fabric")
    failure = json.loads(cli("status", "--json", code=1).stdout)["last_failure"]
    assert failure["service"] == "inference-gateway"
    assert "inference-gateway died more than 5 times in 120 s, giving up" in failure["words"]
    assert failure["log"] == str(cli.home / "run" / "logs" / "inference-gateway.log")
    for said in (cli("status", code=1).stdout, cli("logs").stderr):
        assert "the last fabric ended by itself at" in said
        assert "giving up" in said
    log = (cli.home / "run" / "logs" / "supervisor.log").read_text()
    assert log.index("the fabric ends: inference-gateway died") < log.index("inference-worker drains")

    del cli.extra["FAKE_INFERENCE_GATEWAY"]
    cli("up", "--detach", "--no-engram", *FOLDER)
    cli("down")
    assert "last_failure" not in json.loads(cli("status", "--json", code=1).stdout)
    assert cli("logs").stderr == ""


def test_a_pool_that_keeps_dying_is_failing_and_the_others_stay_up(cli: Any, wait_for: Callable[..., Any]) -> None:
    cli("up", "--detach", *FOLDER)
    others = marks_of(cli)[1:]
    kill_again_and_again(cli, wait_for, "engram-pool", 6)
    wait_for(lambda: cli.state()["services"][0]["stage"] == "failing", "the pool is failing")
    run = cli("status", code=1)
    assert "failing" in run.stdout
    assert "dies again and again" in run.stdout
    assert all(mark.alive() for mark in others)
    assert cli("chat", "Is this a loom?").stdout == "Is this a loom? indeed\n"


def test_one_of_several_workers_that_keeps_dying_is_failing_and_the_others_serve(cli: Any, wait_for: Callable[..., Any]) -> None:
    cli("up", "--detach", "--no-engram", "--no-asm", *FOLDER, "--workers", "2")
    others = [cli.process(name) for name in ("inference-worker", "inference-gateway")]
    kill_again_and_again(cli, wait_for, "inference-worker-2", 6)
    wait_for(lambda: cli.state()["services"][1]["stage"] == "failing", "the second worker is failing")
    assert all(mark.alive() for mark in others)
    assert cli("chat", "Is this a loom?").stdout == "Is this a loom? indeed\n"


def test_the_only_worker_that_keeps_dying_ends_the_fabric(cli: Any) -> None:
    from treadle.cli.fabric import FabricRun
    from treadle.cli.fabric_options import FabricOptions
    from treadle.cli.run_folder import RunFolder

    for workers, given_up in ((1, True), (2, False)):
        run = FabricRun(RunFolder(cli.home), FabricOptions(workers=workers), lambda event: None)
        assert run._worker_spec("inference-worker", "", "").given_up is given_up


@pytest.mark.parametrize("supervisor", ["dead", "standing still"])
def test_down_kills_with_a_service_what_it_had_started(
    cli: Any, supervisor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from treadle.cli import up
    from treadle.cli.process_mark import ProcessMark
    from treadle.cli.run_folder import FabricState, RunFolder, ServiceRecord

    monkeypatch.setattr(up, "DOWN_SECONDS", 0.1)
    folder = RunFolder(cli.home)
    watches = f"import subprocess, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); {LEADER}"
    command = [sys.executable, "-c", watches, sys.executable, "-c", STARTS_ONE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent, ExitStack() as stack:
        assert parent.stdout is not None
        leader, started = (ProcessMark.of(int(pid)) for pid in parent.stdout.readline().split())
        above = ProcessMark.of(parent.pid)
        stack.callback(lambda: [mark.send(signal.SIGKILL) for mark in (above, leader, started)])
        with folder.lock():
            folder.write(
                FabricState(above, "ready", "", "", services=(ServiceRecord("inference-worker", "ready", process=leader),))
            )
        if supervisor == "dead":
            parent.kill()
            parent.wait()
            assert up.take_down(folder)[0] is False
        else:
            assert up.take_down(folder)[0] is True
        assert all(mark.wait_gone(10.0) for mark in (above, leader, started))
    assert folder.read_any() is None


def test_a_refused_second_fabric_leaves_the_first_ones_errors_alone(cli: Any) -> None:
    cli("up", "--detach", "--no-engram", *FOLDER)
    errors = cli.home / "run" / "logs" / "supervisor.stderr"
    with errors.open("a") as file:
        file.write("a warning\n")
    assert "already up" in cli("up", "--detach", *FOLDER, code=1).stderr
    assert errors.read_text() == "a warning\n"
    cli("down")
    cli("up", "--detach", "--no-engram", *FOLDER)
    assert errors.read_text() == ""  # a new one begins anew


@pytest.mark.parametrize(
    ("arguments", "served_as"),
    [
        (("--model", "./model"), None),
        (("--model", "./model", "--served-model-name", "mine"), "mine"),
        (("--model", "smollm2-135m"), "smollm2-135m"),
    ],
)
def test_the_worker_names_a_folder_itself_unless_told(cli: Any, arguments: tuple[str, ...], served_as: str | None) -> None:
    cli("up", "--detach", "--no-engram", *FREE, *arguments)
    process = cli.process("inference-worker")
    words = psutil.Process(process.pid).cmdline()
    assert (words[words.index("--served-model-name") + 1] if "--served-model-name" in words else None) == served_as


def test_a_gateway_on_ipv6_has_urls_with_brackets(cli: Any) -> None:
    cli("up", "--detach", "--no-engram", "--host", "::1", *FOLDER)
    assert cli.state()["gateway_url"].startswith("http://[::1]:")
    assert cli("chat", "Is this a loom?").stdout == "Is this a loom? indeed\n"


def test_services_are_started_with_what_the_options_say(cli: Any) -> None:
    key_file = cli.home / "keys"
    key_file.write_text("# ours\nsecret\n")
    cli(
        "up", "--detach", *FOLDER, "--engram-transport", "rpc", "--engram-fusion", "on", "--api-key-file", str(key_file),
    )  # fmt: skip
    logs = cli("logs").stdout
    assert "inference-worker begins" not in cli("logs", "pool").stdout
    begun = {line.partition(" | ")[0].strip(): line for line in logs.splitlines() if "begins with" in line}
    assert "--segment-dir" in begun["engram-pool"]
    assert all(flag in begun["inference-worker"] for flag in ("--engram-pool", "--engram-transport", "--engram-fusion"))
    assert "--api-key-file" in begun["inference-gateway"]
    assert cli.state()["api_key_file"] == str(key_file)
    assert not (cli.home / "run" / "logs" / "model-fetch.log").exists()  # a folder is used as it is


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_worker_answers_nobody_but_who_can_read_this_users_key(cli: Any, workers: str) -> None:
    up = json.loads(cli("up", "--detach", "--json", *FOLDER, "--workers", workers).stdout)
    file = Path(up["worker_key_file"])
    assert file == cli.home / "run" / "worker.key"
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]
    key = file.read_text().strip()
    for record in up["services"]:
        if record["service"].startswith("inference-worker"):
            for shown in (None, "another"):
                with Fabric(worker=record["listen"], key=shown) as stranger, pytest.raises(AccessDenied):
                    stranger.worker.status()
            with Fabric(worker=record["listen"], key=key) as ours:
                assert ours.worker.status().model == "fake-135m"
    for service in marks_of(cli):
        assert key not in "".join(psutil.Process(service.pid).cmdline())  # which all users can see
    assert cli("status").stdout
    cli("down")
    assert not file.exists()
    cli("up", "--detach", *FOLDER)
    assert file.read_text().strip() not in ("", key)


def test_several_workers_share_a_pool_and_a_gateway(cli: Any) -> None:
    cli("up", "--detach", *FOLDER, "--workers", "3")
    names = ["engram-pool", "asm-store", "inference-worker", "inference-worker-2", "inference-worker-3", "inference-gateway"]
    records = {record["service"]: record for record in cli.state()["services"]}
    assert list(records) == names
    words = {name: psutil.Process(cli.process(name).pid).cmdline() for name in names[1:]}
    workers = names[2:5]
    told = ",".join(f"{name}={records[name]['listen']}" for name in workers)
    assert words["inference-gateway"][words["inference-gateway"].index("--worker") + 1] == told
    for name in workers:
        assert words[name][words[name].index("--engram-pool") + 1] == records["engram-pool"]["listen"]
        assert words[name][words[name].index("--asm-store") + 1] == records["asm-store"]["listen"]
    status = json.loads(cli("status", "--json").stdout)
    assert [service["service"] for service in status["services"] if service["ready"]] == names
    assert "inference-worker-3: " in cli("status").stdout
    assert "inference-worker-2" in cli("logs", "worker").stdout
    cli("down")
    assert stopped(cli) == ["inference-gateway", *workers, "asm-store", "engram-pool"]


def test_a_store_keeps_dictionaries_where_it_is_told_and_status_lists_what_requests_can_choose(cli: Any) -> None:
    cli.extra["FAKE_PREFIXES"] = "nba-rules,old-rules"
    cli("up", "--detach", *FOLDER, "--asm-dir", "kept")
    assert (cli.home / "kept").is_dir()
    words = psutil.Process(cli.process("asm-store").pid).cmdline()
    assert words[words.index("--data-dir") + 1] == str(cli.home / "kept")
    services = {service["service"]: service for service in json.loads(cli("status", "--json").stdout)["services"]}
    assert services["asm-store"]["note"] == "no dictionaries: 0.0 MB of 1000.0 MB"
    prefixes = services["inference-worker"]["figures"]["prefixes"]
    assert [(each["name"], each["open"], each["prefix_tokens"]) for each in prefixes] == [
        ("nba-rules", True, 4096),
        ("old-rules", False, 4096),
    ]
    text = cli("status").stdout
    assert "old-rules: model.rope differs" in text
    assert next(line.split() for line in text.splitlines() if line.split()[:1] == ["nba-rules"])[2] == "open"
    assert max(map(len, text.splitlines())) <= 80


def test_a_store_can_be_left_out(cli: Any) -> None:
    cli("up", "--detach", *FOLDER, "--no-asm")
    assert "asm-store" not in [record["service"] for record in cli.state()["services"]]
    assert "--asm-store" not in psutil.Process(cli.process("inference-worker").pid).cmdline()
    assert "leave --asm-dir out" in cli("up", *FOLDER, "--no-asm", "--asm-dir", "kept", code=1).stderr


def test_the_commands_of_pool_and_store_find_those_of_the_fabric(cli: Any) -> None:
    cli("up", "--detach", *FOLDER)
    records = {record["service"]: record["listen"] for record in cli.state()["services"]}
    assert json.loads(cli("asm", "where").stdout) == {"store": records["asm-store"]}
    cli.extra["TREADLE_ASM_STORE"] = "elsewhere:1"
    assert json.loads(cli("asm", "where").stdout) == {"store": "elsewhere:1"}


@pytest.mark.parametrize("count", ["0", "17"])
def test_a_number_of_workers_that_no_machine_has_is_refused(cli: Any, count: str) -> None:
    assert f"--workers: 1 to 16, got {count}" in cli("up", *FOLDER, "--workers", count, code=1).stderr


def test_the_worker_of_another_engine_is_started_by_its_own_command(cli: Any) -> None:
    cli("up", "--detach", *FOLDER, "--engine", "vllm", "--worker-command", f"{sys.executable} -m inference_worker")
    begun = next(line for line in cli("logs", "worker").stdout.splitlines() if "begins with" in line)
    assert "--engine" in begun
    figures = next(
        each["figures"] for each in json.loads(cli("status", "--json").stdout)["services"] if "engine" in each["figures"]
    )
    assert (figures["engine"], figures["engine_version"], figures["dtype"]) == ("vllm", "1.2", "float32")
    assert "on vllm 1.2 float32" in cli("status").stdout
    assert "asm-store" in cli("status").stdout
    assert "--asm-store" in begun


def test_vllm_runs_in_the_environment_beside_this_one_or_the_refusal_names_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.cli.worker_engine import WorkerEngine, worker_command

    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    with pytest.raises(NotFound, match="make vllm-env"):
        worker_command(WorkerEngine.VLLM, "", "inference_worker")
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert worker_command(WorkerEngine.VLLM, "", "inference_worker") == (str(python), "-m", "inference_worker")
    assert worker_command(WorkerEngine.EMBEDDED, "", "inference_worker") == (sys.executable, "-m", "inference_worker")


def test_ctrl_c_drains_gateway_worker_and_pool_in_that_order(cli: Any) -> None:
    process = cli.start("up", *FOLDER)
    cli.wait_ready()
    marks = marks_of(cli)
    code, out, err = finish(process)
    assert code == 0, err
    assert "Ctrl-C stops it" in out
    assert "curl http://127.0.0.1:" in out
    assert "\x1b" not in out + err
    assert stopped(cli) == list(reversed(SERVICES))
    assert not any(mark.alive() for mark in marks)
    assert cli.state() is None


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach")])
def test_a_service_that_dies_before_it_is_ready_stops_everything(cli: Any, arguments: tuple[str, ...]) -> None:
    cli.extra["FAKE_INFERENCE_WORKER"] = "die"
    run = cli(*arguments, *FOLDER, code=1)
    assert "inference-worker did not become ready (exit code 1)" in run.stderr
    assert "no such port: 42" in run.stderr
    assert "Traceback" not in run.stderr
    assert stopped(cli) == ["inference-worker", "asm-store", "engram-pool"]
    assert cli.state() is None


def test_a_model_that_is_not_known_is_told_as_the_fetch_tells_it(cli: Any) -> None:
    assert "no model 'unknown'" in cli("up", *FREE, "--model", "unknown", code=1).stderr
    assert "has no config.json" in cli("up", *FREE, "--model", "./nowhere", code=1).stderr


def test_ctrl_c_during_the_start_takes_everything_down(cli: Any, wait_for: Callable[..., Any]) -> None:
    cli.extra["FAKE_INFERENCE_WORKER"] = "mute"
    for arguments in (("up",), ("up", "--detach")):
        process = cli.start(*arguments, *FOLDER)
        wait_for(lambda: cli.process("inference-worker"), "the worker's process")
        mark = cli.process("engram-pool")
        if arguments == ("up",):
            assert "already up" in cli("up", *FOLDER, code=1).stderr
            assert "still starting" in cli("chat", "hello", code=1).stderr
            assert "inference-worker" in cli("status", code=1).stdout
        code, _, err = finish(process)
        assert code == 130, err
        assert not mark.alive()
        assert cli.state() is None


def test_a_taken_port_is_told_before_anything_starts(cli: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = cli("up", "--gateway-port", port, code=1).stderr
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "--gateway-port" in error
    assert not (cli.home / "run" / "logs" / "engram-pool.log").exists()


def base_of_free_ports() -> int:
    """Below those that the system hands out, so that nobody takes one in between."""
    for base in range(20000, 30000, 20):
        with ExitStack() as stack, suppress(OSError):
            for port in range(base, base + 15):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return base
    raise AssertionError("no 15 free ports in a row")


def test_a_taken_port_of_another_service_is_told_in_one_line(cli: Any) -> None:
    base = base_of_free_ports()
    port = base + 4
    with socket.create_server(("127.0.0.1", port)):
        error = cli("up", "--gateway-port", "0", "--port-base", str(base), code=1).stderr
    assert f"inference-worker cannot listen on 127.0.0.1:{port}: Address already in use" in error
    assert "--port-base 0" in error
    assert not (cli.home / "run" / "logs" / "engram-pool.log").exists()


def test_ports_follow_the_base(cli: Any) -> None:
    from treadle.cli.fabric import POOL, WORKER, FabricRun
    from treadle.cli.fabric_options import FabricOptions
    from treadle.cli.run_folder import RunFolder

    run = FabricRun(RunFolder(cli.home), FabricOptions(), lambda event: None)
    pool, worker = run._internal(POOL, ()), run._internal(WORKER, ())
    assert (pool.listen, pool.metrics) == ("127.0.0.1:7401", "127.0.0.1:7411")
    assert (worker.listen, worker.metrics) == ("127.0.0.1:7404", "127.0.0.1:7414")


def test_a_second_ctrl_c_kills_what_does_not_drain(cli: Any, wait_for: Callable[..., Any]) -> None:
    cli.extra["FAKE_INFERENCE_GATEWAY"] = "stubborn"
    process = cli.start("up", *FOLDER)
    cli.wait_ready()
    process.send_signal(signal.SIGINT)
    log = cli.home / "run" / "logs" / "supervisor.log"
    wait_for(lambda: "inference-gateway drains" in log.read_text(), "the drain")
    code, _, err = finish(process)  # no more patience
    assert code == 0, err
    assert "inference-gateway killed" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gateway-port", "70000"), "ports lie between"),
        (("--timeout", "0"), "positive number"),
        (("--host", "0.0.0.0"), "--api-key-file"),
        (("--worker-command", "no-such-python -m inference_worker"), "no-such-python is not a program"),
    ],
)
def test_wrong_options_are_refused_with_a_reason(cli: Any, arguments: tuple[str, ...], words: str) -> None:
    assert words in cli("up", *arguments, code=1).stderr


def test_logs_of_what_was_never_up_say_so(cli: Any) -> None:
    assert "no log of any service" in cli("logs", code=1).stderr
    (cli.home / "run" / "logs").mkdir(parents=True, exist_ok=True)
    (cli.home / "run" / "logs" / "engram-pool.log").write_text("here\n")
    assert "there is engram-pool\n" in cli("logs", "gateway", code=1).stderr
    (cli.home / "run" / "logs" / "inference-worker.log").write_text("here\n")
    assert "there are engram-pool, inference-worker\n" in cli("logs", "gateway", code=1).stderr


def test_logs_as_json_are_a_document_for_each_line(cli: Any) -> None:
    cli("up", "--detach", "--no-engram", *FOLDER)
    documents = [json.loads(line) for line in cli("logs", "--json").stdout.splitlines()]
    assert {document["service"] for document in documents} >= {"inference-worker", "inference-gateway", "supervisor"}
    assert any("inference-worker is ready on" in document["line"] for document in documents)


def test_following_logs_shows_what_is_written_from_now_on(cli: Any) -> None:
    cli("up", "--detach", *FOLDER)
    follower = cli.start("logs", "-f", "-n", "1", "supervisor")
    assert follower.stdout is not None
    assert "inference-gateway is ready" in follower.stdout.readline()
    cli("down")
    assert "inference-gateway drains" in follower.stdout.readline()
    assert finish(follower)[0] == 0
    assert not os.path.exists(cli.segments)
