"""The run folder, the segment folder and the logs: locks, sweeps, limits."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.cli.process_mark import ProcessMark
from treadle.cli.run_folder import FabricState, RunFolder, ServiceRecord, home
from treadle.cli.segments import claimed, segment_dir, sweep_abandoned
from treadle.cli.service_log import LogFollower, ServiceLog, follow
from treadle.contract.errors import DataLoss, ResourceExhausted, Unavailable

ME = ProcessMark.of(os.getpid())
STATE = FabricState(
    ME, "ready", "http://127.0.0.1:8000", "/dev/shm/x", services=(ServiceRecord("engram-pool", "ready", process=ME),)
)
DEAD = replace(STATE, supervisor=replace(ME, created_at_seconds=1.0))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_a_state_is_read_as_it_was_written(folder: RunFolder) -> None:
    with folder.lock():
        folder.write(STATE)
    assert folder.read() == STATE
    assert STATE.service("engram-pool") == STATE.services[0]
    assert STATE.service("other") is None
    folder.forget()
    assert folder.read() is None


def test_a_fabric_has_a_key_of_its_own_that_goes_with_its_state(folder: RunFolder) -> None:
    with folder.lock():
        state = replace(STATE, worker_key_file=str(folder.make_worker_key()))
        first = state.worker_key()
        assert len(bytes.fromhex(first or "")) == 32
        folder.worker_key_path.chmod(0o644)
        folder.make_worker_key()
        assert folder.worker_key_path.stat().st_mode & 0o777 == 0o600
        assert state.worker_key() != first
    folder.forget()
    with pytest.raises(Unavailable, match=r"worker\.key, cannot be read"):
        state.worker_key()
    assert STATE.worker_key() is None


def test_the_state_of_a_dead_fabric_does_not_count(folder: RunFolder) -> None:
    with folder.lock():
        folder.write(DEAD)
    assert folder.read() is None
    assert folder.read_any() == DEAD


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "treadle.run/9"}', '{"schema": "treadle.run/1", "services": []}'])
def test_a_state_that_cannot_be_read_is_named(folder: RunFolder, text: str) -> None:
    folder.path.mkdir()
    folder.state_path.write_text(text)
    with pytest.raises(DataLoss, match=r"state\.json"):
        folder.read()


def test_a_second_fabric_is_refused_and_told_who_is_up(folder: RunFolder) -> None:
    with folder.lock():
        with pytest.raises(Unavailable, match="is starting"), folder.lock():
            pass
        folder.write(STATE)
        with pytest.raises(Unavailable, match=rf"pid {ME.pid}, http://127\.0\.0\.1:8000; `treadle down`"), folder.lock():
            pass
    with folder.lock():
        pass


def test_the_home_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_HOME", "~/somewhere")
    assert home() == Path.home() / "somewhere"
    monkeypatch.delenv("TREADLE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert home() == Path.home() / ".cache" / "treadle"  # where fetched models are too


def test_a_failure_is_kept_until_it_is_forgotten(folder: RunFolder) -> None:
    assert folder.read_failure() is None
    with folder.lock():
        kept = folder.write_failure("engram-pool", "died\nno such port: 42")
    assert folder.read_failure() == kept
    assert (kept.service, kept.words, kept.log) == ("engram-pool", "died\nno such port: 42", str(folder.logs / "engram-pool.log"))
    folder.failure_path.write_text("[]")
    with pytest.raises(DataLoss, match=r"last-failure\.json"):
        folder.read_failure()
    folder.forget_failure()
    assert folder.read_failure() is None


# -- segments -------------------------------------------------------------------------------------------------------------


def left_behind(home: Path, shared_memory: Path) -> Path:
    folder = segment_dir(home, shared_memory)
    folder.mkdir(parents=True)
    (folder / "pool.lock").touch()
    (folder / "table").write_bytes(b"x" * 8192)
    return folder


def test_a_claim_sweeps_what_a_crash_left_and_leaves_nothing_itself(tmp_path: Path) -> None:
    folder = left_behind(tmp_path / "home", tmp_path)
    with claimed(folder) as freed:
        assert freed >= 8192
        assert not folder.exists()
        folder.mkdir()
        (folder / "table").touch()
    assert not folder.parent.exists()


def _make_and_fail(folder: Path) -> None:
    folder.mkdir()
    (folder / "no" / "such").touch()


def test_a_claim_leaves_nothing_when_what_it_was_for_fails(tmp_path: Path) -> None:
    folder = segment_dir(tmp_path / "home", tmp_path)
    with pytest.raises(FileNotFoundError), claimed(folder):
        _make_and_fail(folder)
    assert not folder.parent.exists()


def test_one_home_has_one_folder_and_another_home_another() -> None:
    assert segment_dir(Path("/a")) == segment_dir(Path("/a/b/.."))
    assert segment_dir(Path("/a")) != segment_dir(Path("/b"))
    assert segment_dir(Path("/a")).parent.name == f"treadle-{os.getuid()}"


def test_what_a_live_pool_holds_is_not_swept(tmp_path: Path) -> None:
    folder = left_behind(tmp_path / "home", tmp_path)
    with (folder / "pool.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="a running engram-pool holds"), claimed(folder):
            pass
        assert sweep_abandoned(tmp_path / "home", tmp_path) == 0
        assert (folder / "table").exists()
    assert sweep_abandoned(tmp_path / "home", tmp_path) >= 8192
    assert not folder.exists()


def test_what_a_live_fabric_claims_is_not_swept_while_its_pool_is_down(tmp_path: Path) -> None:
    other, crashed = segment_dir(tmp_path / "other", tmp_path), left_behind(tmp_path / "crashed", tmp_path)
    with claimed(other):
        left_behind(tmp_path / "other", tmp_path)
        with pytest.raises(Unavailable, match="another fabric holds"), claimed(other):
            pass
        assert sweep_abandoned(tmp_path / "home", tmp_path) >= 8192
        assert other.exists()
        assert not crashed.exists()


def test_a_place_that_somebody_else_prepared_is_refused(tmp_path: Path) -> None:
    folder = segment_dir(tmp_path / "home", tmp_path)
    (tmp_path / "theirs").mkdir()
    folder.parent.symlink_to(tmp_path / "theirs")
    with pytest.raises(ResourceExhausted, match="not safe to use"), claimed(folder):
        pass
    folder.parent.unlink()
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(ResourceExhausted, match="not safe to use"), claimed(folder):
        pass


# -- logs -----------------------------------------------------------------------------------------------------------------


def test_a_log_stays_within_its_limit_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path, "pool", bytes_max=100)
    for number in range(100):
        log.write(b"line %3d\n" % number)
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200
    follower = LogFollower(log.path)
    assert follower.last(12) == [f"line {number:3}" for number in range(88, 100)]
    assert follower.last(0) == []
    follower.close()


def test_what_is_written_between_the_last_lines_and_those_that_follow_is_neither_lost_nor_shown_twice(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path, "pool", bytes_max=40)
    log.write(b"one\ntwo\nth")
    follower = LogFollower(log.path)
    log.write(b"ree\nfour\n")
    assert follower.last(5) == ["one", "two"]
    log.write(b"a line that does not fit any more\n")  # the file that is followed is the rotated one now
    assert follower.last(1) == ["two"]
    assert list(follower.lines()) == ["three", "four", "a line that does not fit any more"]
    follower.close()
    log.close()


def test_a_follower_sees_whole_lines_through_a_rotation(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path, "pool", bytes_max=20)
    log.write(b"before\n")
    follower = LogFollower(log.path)
    log.write(b"one\nha")
    assert list(follower.lines()) == ["one"]
    log.write(b"lf\n")
    log.write(b"after the rotation\n")
    assert list(follower.lines()) == ["half", "after the rotation"]
    follower.close()
    log.close()


def test_following_several_logs_names_the_service_and_waits_for_files_that_are_not_there_yet(tmp_path: Path) -> None:
    logs: list[ServiceLog] = []

    def write_then(seconds: float) -> None:
        logs.append(ServiceLog(tmp_path, "late"))
        logs[-1].write(b"here\n")

    follower = LogFollower(tmp_path / "late.log")
    assert follower.last(5) == []
    seen = list(follow({"late": follower}, stop=lambda: len(logs) == 2, wait=write_then))
    assert seen == [("late", "here")]
    follower.close()
    for log in logs:
        log.close()
