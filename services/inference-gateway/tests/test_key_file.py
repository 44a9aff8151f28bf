"""The key file: what may stand in it, who may read it, and that it is followed."""

from __future__ import annotations

import hashlib
import json
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inference_gateway.adapters import key_file
from inference_gateway.adapters.key_file import KeyFile, read_keys
from inference_gateway.commands import app
from inference_gateway.domain.api_keys import ANYBODY, ApiKeys, KeyRecord, cache_salt
from inference_gateway.domain.limits import Allowance
from treadle.chassis.keys import hashed, key_digest, new_key
from treadle.chassis.server import KeyLine, read_key_lines
from treadle.chassis.settings import WrongSetting
from treadle.contract.errors import AccessDenied, InvalidArgument


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    """The file with that text, in one step: whoever follows it never finds it empty or half."""
    new = path.with_name("new-keys")
    new.touch(mode)
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)
    return path


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        time.sleep(0.02)


def test_a_key_is_256_random_bits_and_its_digest_is_all_that_a_file_needs(tmp_path: Path) -> None:
    key = new_key()
    assert key.startswith("tk-")
    assert len(key) == 3 + 43
    assert new_key() != key
    assert hashed(key) == "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    assert key_digest(key) == key_digest(hashed(key))
    keys = ApiKeys(read_keys(written(tmp_path / "keys", f"{hashed(key)} tenant=team requests_per_minute=5 priority=high\n")))
    caller = keys.caller_of(f"Bearer {key}")
    assert (caller.tenant_name, caller.priority) == ("team", "high")
    for wrong in (hashed(key), key[:-1], f"{key}x", "", hashlib.sha256(key.encode()).hexdigest()):
        with pytest.raises(AccessDenied):
            keys.caller_of(f"Bearer {wrong}")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sha256:12", "64 hexadecimal digits"),
        ("sha256:" + "A" * 64, "small letters"),
        ("other tenant=King/James", "tenant: a name is"),
        ("other requests_per_minute=0", "requests_per_minute: a whole number from 1"),
        ("other tokens_per_minute=1e3", "tokens_per_minute: a whole number"),
        ("other calls_max=-1", "calls_max: a whole number"),
        ("other priority=urgent", "priority: one of high, normal, low"),
        ("other engram=kjv@12", "engram: "),
        (hashed("secret-key"), "the key of line 1 again"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_shows_no_key(tmp_path: Path, line: str, told: str) -> None:
    path = written(tmp_path / "keys", f"secret-key\n{line}\n")
    with pytest.raises(WrongSetting) as refused:
        read_keys(path)
    message = str(refused.value)
    assert message.startswith(f"api_key_file: {path} line 2: ")
    assert told in message
    assert not any(word in message for word in ("secret-key", "other", "sha256:" + "A" * 64))


@pytest.mark.parametrize(
    ("mode", "text", "told"),
    [
        (0o644, "secret-key\n", "line 1: a key that anybody of this machine may read: chmod o-r"),
        (0o602, "secret-key\n", "may write"),
        (0o666, hashed("secret-key") + "\n", "may write"),
        (0o644, hashed("secret-key") + "\n", None),
        (0o640, "secret-key\n", None),
    ],
)
def test_what_others_may_read_or_write_is_checked(tmp_path: Path, mode: int, text: str, told: str | None) -> None:
    path = written(tmp_path / "keys", text, mode)
    if told is None:
        assert len(read_keys(path)) == 1
        return
    with pytest.raises(WrongSetting, match=told):
        read_keys(path)


def test_keys_as_they_are_still_work_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(read_keys(written(tmp_path / "keys", f"{hashed('one')}\nsecret-key\n")))
    assert keys.caller_of("Bearer secret-key").tenant
    (warning,) = caplog.records
    assert "treadle key hash" in warning.getMessage()
    assert vars(warning)["first_line"] == 2
    assert "secret-key" not in str(vars(warning))


def test_without_a_file_anybody_comes_in_and_with_an_empty_one_nobody() -> None:
    assert ApiKeys(None).caller_of(None) is ANYBODY
    nobody = ApiKeys([])
    assert nobody.any
    with pytest.raises(AccessDenied):
        nobody.caller_of("Bearer ")


def test_a_key_that_stays_keeps_what_it_has_used() -> None:
    record = KeyRecord(key_digest("one"), allowance=Allowance(requests_per_minute=2))
    keys = ApiKeys([record])
    use = keys.caller_of("Bearer one").use
    assert use is not None
    use.begin()
    keys.replace([KeyRecord(key_digest("two")), record])
    again = keys.caller_of("Bearer one").use
    assert again is use
    assert use.standings()[0].remaining == 1


def test_keys_of_one_tenant_share_a_salt_and_others_do_not() -> None:
    records = [
        KeyRecord(key_digest(key), tenant) for key, tenant in (("a", "team"), ("b", "team"), ("c", "other"), ("d", ""), ("e", ""))
    ]
    keys = ApiKeys(records)
    salts = {key: keys.caller_of(f"Bearer {key}").tenant for key in "abcde"}
    assert salts["a"] == salts["b"]
    assert len(set(salts.values())) == 4
    assert all(len(salt) == 32 for salt in salts.values())


def test_a_wish_divides_its_tenant_and_reaches_no_other() -> None:
    tenants = [ApiKeys([KeyRecord(key_digest(key))]).caller_of(f"Bearer {key}").tenant for key in ("a", "b")] + [""]
    wishes = [None, "x", "y", *tenants[:2], "\0x"]
    salts = {(tenant, wish): cache_salt(tenant, wish) for tenant in tenants for wish in wishes}
    assert len(set(salts.values())) == len(salts)
    assert cache_salt("", None) == ""


async def test_a_file_that_is_taken_away_while_it_is_read_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = written(tmp_path / "keys", "old-key\n"), list[str]()
    file = KeyFile(path, told.append)

    def read_and_gone(path: Path, setting: str, options: Any) -> list[KeyLine]:
        lines = read_key_lines(path, setting, options)
        path.unlink()
        return lines

    written(path, "other-key\n")
    with monkeypatch.context() as patched:
        patched.setattr(key_file, "read_key_lines", read_and_gone)
        await file.look()
    assert file.keys.caller_of("Bearer old-key").tenant
    written(path, "newest-key\n")
    await file.look()
    assert told == ["failed", "read"]
    assert file.keys.caller_of("Bearer newest-key").tenant
    with pytest.raises(AccessDenied):
        file.keys.caller_of("Bearer old-key")


def test_a_revoked_key_opens_nothing_and_a_new_one_does_without_a_restart(
    start_gateway: Any, session_worker: Any, worker: Any, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys", "old-key\n")
    gateway = start_gateway("--worker", session_worker.address, "--api-key-file", str(path))

    def opens(key: str) -> bool:
        status = gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
        assert status in (200, 401)
        return bool(status == 200)

    gateway.wait_ready()
    assert opens("old-key")
    written(path, f"{hashed('new-key')}\n")
    gateway.process.send_signal(signal.SIGHUP)  # at once; else within a second
    wait_until(lambda: opens("new-key"), "the new key opens")
    assert not opens("old-key")
    written(path, "new-key engram=\n")  # no line that fits: all stays as it was
    wait_until(lambda: gateway.figure("treadle_gateway_key_file_changes_total", outcome="failed") == 1, "it is seen")
    assert opens("new-key")
    written(path, "# nobody\n")
    wait_until(lambda: not opens("new-key"), "nobody comes in")
    assert gateway.figure("treadle_gateway_key_file_changes_total", outcome="empty") == 1
    assert gateway.process.poll() is None
    assert not any(word in gateway.log for word in ("old-key", "new-key"))


def test_a_stream_of_a_key_that_is_revoked_meanwhile_ends_well(
    start_gateway: Any, session_worker: Any, worker: Any, scripts: Any, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys", "old-key\nother-key\n")
    gateway = start_gateway("--worker", session_worker.address, "--api-key-file", str(path))
    gateway.wait_ready()
    gateway.http.headers["authorization"] = "Bearer old-key"
    worker.script = scripts["wait_first"](1.0)
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with gateway.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        written(path, "other-key\n")
        gateway.process.send_signal(signal.SIGHUP)
        assert list(stream.iter_lines())[-2] == "data: [DONE]"
    wait_until(lambda: gateway.http.get("/v1/models").status_code == 401, "the key is revoked")


def test_new_makes_a_key_and_the_line_that_knows_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    run = CliRunner().invoke(
        app,
        [
            "new",
            "--json",
            "--file",
            str(path),
            "--tenant",
            "team",
            "--tokens-per-minute",
            "5000",
            "--priority",
            "low",
            "--engram",
            "kjv",
        ],
    )
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert told["line"] in text.splitlines()
    assert told["key"] not in text
    (record,) = read_keys(path)
    assert record.digest == key_digest(told["key"])
    assert (record.tenant, record.priority, record.allowance.tokens_per_minute) == ("team", "low", 5000)
    assert record.memory is not None
    second = CliRunner().invoke(app, ["new", "--file", str(path)])
    assert second.exit_code == 0
    assert second.stdout.strip() not in path.read_text()
    assert len(read_keys(path)) == 2


def test_new_refuses_an_option_that_the_gateway_would_refuse(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["new", "--file", str(tmp_path / "keys"), "--priority", "urgent"])
    assert isinstance(run.exception, InvalidArgument)
    assert not (tmp_path / "keys").exists()


def test_hash_puts_digests_in_place_of_keys_and_leaves_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", f"# team\nfirst-key  engram=kjv\n\n{hashed('second-key')}\n  third-key\n", 0o640)
    run = CliRunner().invoke(app, ["hash", str(path)])
    assert run.exit_code == 0, run.output
    assert "2 keys" in run.stdout
    text = path.read_text()
    assert "first-key" not in text
    assert "third-key" not in text
    assert text.startswith("# team\nsha256:")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    keys = ApiKeys(read_keys(path))
    assert keys.caller_of("Bearer first-key").memory is not None
    assert keys.caller_of("Bearer third-key").tenant != keys.caller_of("Bearer second-key").tenant
    assert [child.name for child in tmp_path.iterdir()] == ["keys"]
    assert "0 keys" in CliRunner().invoke(app, ["hash", str(path)]).stdout
