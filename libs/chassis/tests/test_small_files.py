"""Small files are whole or as before, locks tell the truth about processes, and interrupts wait for a step's end."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.chassis.file_locks import count_readers, hold_for_life, locked_alone
from treadle.chassis.interrupts import interrupts_held
from treadle.chassis.small_files import is_real_folder, make_ours, read_small, write_small
from treadle.contract.errors import DataLoss, InvalidArgument, ResourceExhausted


def test_a_file_is_replaced_at_once_and_read_back_with_a_limit(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for name in ("current.json", ".hidden"):
            write_small(tmp_path / name, b"old")
            write_small(tmp_path / name, b"newer")
            assert read_small(tmp_path / name, 5) == b"newer"
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "current.json"]
    with pytest.raises(DataLoss, match="larger than 4"):
        read_small(tmp_path / "current.json", 4)
    (tmp_path / "link").symlink_to(tmp_path / "current.json")
    for missing in ("link", "nothing"):
        with pytest.raises(DataLoss, match="cannot be read"):
            read_small(tmp_path / missing, 5)


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, ResourceExhausted), (errno.EIO, OSError)])
def test_what_cannot_be_written_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    write_small(tmp_path / "kept", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error, match=os.strerror(number)):
        write_small(tmp_path / "kept", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("kept", b"old")]


def test_a_folder_that_others_could_have_prepared_is_refused(tmp_path: Path) -> None:
    make_ours(tmp_path / "a" / "ours", "data_dir")
    make_ours(tmp_path / "a" / "ours", "data_dir")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "ours")
    (tmp_path / "file").touch()
    assert [is_real_folder(tmp_path / name) for name in ("a", "link", "file")] == [True, False, False]
    for name, says in (("open", "writable by others"), ("link", "a link"), ("file", "no folder")):
        with pytest.raises(InvalidArgument, match=f"data_dir: .*{says}"):
            make_ours(tmp_path / name, "data_dir")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    shutil.chown(tmp_path / "theirs", 12345)
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "ours"):
        with pytest.raises(InvalidArgument, match="belongs to user 12345"):
            make_ours(path, "data_dir")


HOLDER = (
    "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); print('held', flush=True); sys.stdin.read()"
)


def test_readers_are_counted_and_keep_a_lock_from_being_taken_alone(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    reader = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "held\n"
    with locked_alone(lock) as alone:
        assert not alone
    assert count_readers([lock, tmp_path / "gone"]) == [1, 0]
    reader.kill()
    reader.communicate()
    assert count_readers([lock]) == [0]
    with locked_alone(lock) as alone:
        assert alone


def test_a_lock_for_life_is_that_of_the_file_that_others_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    first = hold_for_life(path)
    assert first is not None
    assert path.read_text() == f"{os.getpid()}\n"
    assert hold_for_life(path) is None
    os.close(first)
    tried = 0

    def unlinked_meanwhile(descriptor: int, operation: int) -> None:
        nonlocal tried
        tried += 1
        if tried == 1:
            path.unlink()
        real(descriptor, operation)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", unlinked_meanwhile)
    again = hold_for_life(path)
    assert again is not None
    assert (tried, os.fstat(again).st_ino) == (2, path.stat().st_ino)
    os.close(again)


def test_interrupts_are_heard_where_what_was_done_can_be_kept() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupts_held() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
