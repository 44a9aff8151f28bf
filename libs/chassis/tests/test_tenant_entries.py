"""What is the same in every tenants file: its form, and tokens as files or digests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from treadle.chassis.settings import WrongSetting
from treadle.chassis.tenant_entries import TENANTS_MAX, is_admin, read_entries, token_digests

FIELDS = {"name", "token_file", "token_sha256", "admin"}
DIGEST = hashlib.sha256(b"secret").hexdigest()


def test_tokens_are_taken_from_files_and_as_digests(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# two\nsecret\nsha256:{DIGEST}\n")
    path = tmp_path / "tenants.yaml"
    path.write_text(
        f"tenants: [{{name: a, token_sha256: '{DIGEST.upper()}', admin: true}}, {{name: b, token_file: {tmp_path}/tokens}}]"
    )
    first, second = read_entries(path, FIELDS)
    assert (token_digests(first, "a"), is_admin(first, "a")) == ([bytes.fromhex(DIGEST)], True)
    assert (token_digests(second, "b"), is_admin(second, "b")) == ([bytes.fromhex(DIGEST)] * 2, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants: []", "1 to"), ("- a", "one key"), ("tenants: [a]", "one key"), ("tenants: [{nam: a}]", r"unknown fields \['nam'\]"),
        ("tenants: [", "cannot read"), ("#" * (1 << 20) + "\n", "above"), ("tenants: [" + "{}, " * (TENANTS_MAX + 1) + "]", "1 to 4096"),
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tenants.yaml").write_text(text)
    with pytest.raises(WrongSetting, match=words):
        read_entries(tmp_path / "tenants.yaml", FIELDS)


def test_an_entry_that_makes_no_sense_is_refused_without_showing_its_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("sha256:c0ffee\n")
    for entry in ({}, {"token_sha256": DIGEST, "token_file": "x"}):
        with pytest.raises(WrongSetting, match="place: token_file or token_sha256, one of the two"):
            token_digests(entry, "place")
    for entry in ({"token_sha256": "c0ffee"}, {"token_file": str(tmp_path / "tokens")}):
        with pytest.raises(WrongSetting, match=r"place: token_.*64 hexadecimal") as refused:
            token_digests(entry, "place")
        assert "c0ffee" not in str(refused.value)
    with pytest.raises(WrongSetting, match="place: admin: true or false, got 'no'"):
        is_admin({"admin": "no"}, "place")
