"""What a deployment and a request may say, and what keeps blocks apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treadle.contract import errors
from treadle.contract.errors import AccessDenied, FingerprintMismatch, InvalidArgument, NotFound, Unavailable
from treadle.contract.policy import Late, WaitPolicy
from treadle.vllm import MemoryConfig, architecture_for, engine_arguments
from treadle.vllm.config import Choice, RequestChoice, pinned
from treadle.vllm.outcomes import (
    EngineReports,
    Failure,
    MemoryFigures,
    RequestOutcome,
    TicketReport,
    UsedMemory,
    because,
    outcome_of,
)
from treadle.vllm.salt import cache_salt, memory_identity, prefix_identity

VERSION = "ab" * 32
POOL = MemoryConfig(engram_pool="127.0.0.1:1", default_memory=f"kjv@{VERSION}", late="fail", wait_seconds_max=0.5)


def test_a_configuration_goes_through_vllms_dictionary_and_back() -> None:
    carried = json.loads(json.dumps({"treadle": POOL.to_dict(), "other": 1}))
    assert MemoryConfig.of(carried) == POOL
    assert MemoryConfig.of({}) == MemoryConfig.of(None) == MemoryConfig()


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"pool": "x"}, "treadle.pool: no such setting; there are engram_pool"),
        ({"engram_pool": 7}, "treadle.engram_pool: a string"),
        ({"transport": "fax"}, "treadle.transport: one of auto"),
        ({"fusion": "off"}, "treadle.fusion: one of auto, on, shadow"),
        ({"late": "never"}, "treadle.late: one of mask, fail"),
        ({"wait_seconds_max": 31}, "wait_seconds_max: 0 to 30"),
        ({"wait_seconds_max": "1"}, "treadle.wait_seconds_max: a number"),
        ({"memories_max": 0}, "treadle.memories_max: 1 to"),
        ({"open_seconds_max": 0}, "treadle.open_seconds_max: above 0"),
        ({"prefixes_max": 0}, "treadle.prefixes_max: 1 to"),
        ({"prefix_outside_share_max": 1.5}, "treadle.prefix_outside_share_max: 0 to 1"),
        ({"prefix_lists_probed": 0}, "treadle.prefix_lists_probed: 1 to"),
        ({"prefix_guard_percent": 101}, "treadle.prefix_guard_percent: 0 to 100"),
        ({"prefix_guard_percent": "50"}, "treadle.prefix_guard_percent: 0 to 100"),
        ({"prefix_index": "tree"}, "treadle.prefix_index: scan or hnsw"),
        ({"asm_store": 7}, "treadle.asm_store: a string"),
        ({"fusion_weights": {"kjv": 1}}, "treadle.fusion_weights: an object of files"),
        ({"default_memory": "kjv"}, "without engram_pool"),
        ({"engram_pool": "a:1", "default_memory": "kjv@12"}, "64 hex digits"),
        ("kjv", "additional_config.treadle: an object"),
    ],
)
def test_a_wrong_setting_is_named(ours: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        MemoryConfig.of({"treadle": ours})


def test_a_request_chooses_or_gets_what_the_engine_says() -> None:
    assert RequestChoice.of(None, POOL) == RequestChoice(Choice("kjv", VERSION), WaitPolicy(0.5, Late.FAIL))
    asked = {"treadle": {"engram": "other", "wait_seconds_max": 0.1, "late": "mask"}}
    assert RequestChoice.of(asked, POOL) == RequestChoice(Choice("other"), WaitPolicy(0.1, Late.MASK))
    assert RequestChoice.of({"treadle": {"engram": "none"}}, POOL).memory is None
    assert RequestChoice.of({"treadle": json.dumps(asked["treadle"])}, POOL) == RequestChoice.of(
        asked, POOL
    )  # as HTTP lets it through


def test_a_version_is_pinned_beside_what_else_was_asked() -> None:
    args = {"other": 1, "treadle": '{"late": "mask"}'}
    assert pinned(args, Choice("kjv", VERSION)) == {"other": 1, "treadle": {"late": "mask", "engram": f"kjv@{VERSION}"}}
    assert pinned(None, Choice("kjv", VERSION)) == {"treadle": {"engram": f"kjv@{VERSION}"}}


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (3, "extra_args.treadle: an object"), ("{", "JSON"), ("[]", "an object"), ({"engrams": "kjv"}, "are known"), ({"engram": 3}, "NAME"), ({"engram": "kjv@x"}, "64 hex"),
        ({"late": "x"}, "late: one of"), ({"wait_seconds_max": -1}, "wait_seconds_max"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_named(ours: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        RequestChoice.of({"treadle": ours}, POOL)


@pytest.mark.parametrize(
    "text",
    [
        r'{"engram": "\ud800"}', '{"engram": "no such"}', '{"engram": "default"}', '{"wait_seconds_max": 1' + "0" * 400 + "}",
        '{"wait_seconds_max": NaN}', '{"wait_seconds_max": Infinity}', "[" * 990 + "]" * 990,
        '{"late":' + "[" * 900 + "]" * 900 + "}",
    ],
)  # fmt: skip
def test_nothing_that_a_request_says_ends_the_engine(text: str) -> None:
    """vLLM's core hands a request to the scheduler, and a step to the model, without a net: any other error is its end."""
    for config in (POOL, MemoryConfig()):
        with pytest.raises(InvalidArgument):
            RequestChoice.of({"treadle": text}, config)
    scheduler = pytest.importorskip("treadle.vllm.scheduler").EngramScheduler
    params = SimpleNamespace(extra_args={"treadle": text})
    here = SimpleNamespace(_memory_config=POOL)
    scheduler._begun(here, SimpleNamespace(sampling_params=params))
    assert params.extra_args == {"treadle": text}  # the model's process reads the same, and refuses it


def test_a_number_too_long_to_be_shown_is_refused_all_the_same() -> None:
    with pytest.raises(InvalidArgument, match="too large"):
        RequestChoice.of({"treadle": {"late": 10**5000}}, POOL)


def test_a_memory_without_a_pool_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no pool"):
        RequestChoice.of({"treadle": {"engram": "kjv"}}, MemoryConfig())


def test_the_key_is_the_files_first_line(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("# ours\n\nsecret\nother\n")
    endpoint = MemoryConfig(engram_pool="a:1", key_file=str(tmp_path / "key")).endpoint
    assert (endpoint.address, endpoint.key) == ("a:1", "secret")
    for text in ("", "# none\n"):
        (tmp_path / "key").write_text(text)
        with pytest.raises(AccessDenied, match="no key"):
            _ = MemoryConfig(engram_pool="a:1", key_file=str(tmp_path / "key")).endpoint


def test_a_request_chooses_a_prefix_by_its_whole_version() -> None:
    name = f"rules@{VERSION}"
    wanted = RequestChoice.of({"treadle": {"prefix": name, "prefix_exact": True}}, MemoryConfig())
    assert (str(wanted.prefix), wanted.prefix_exact, wanted.begins_anew, wanted.memory) == (name, True, False, None)
    assert RequestChoice.of({"treadle": {"prefix": ""}}, MemoryConfig()).prefix is None
    for ours, said in (
        ({"prefix": "rules"}, "prefix: NAME@VERSION expected"), ({"prefix": 7}, r"extra_args\.treadle\.prefix: NAME"),
        ({"prefix": "/etc/passwd"}, "prefix"), ({"prefix": name, "begins_anew": "yes"}, "begins_anew: true or false"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=said):
            RequestChoice.of({"treadle": ours}, MemoryConfig())


def test_the_salt_of_a_prefix_says_which_and_what_answered() -> None:
    other = f"rules@{'cd' * 32}"
    identities = [prefix_identity(name, exact=exact) for name in (f"rules@{VERSION}", other) for exact in (False, True)]
    salts = {cache_salt("one", identity) for identity in (None, memory_identity("a", VERSION, "on"), *identities)}
    assert len(salts) == 6
    both = cache_salt(cache_salt("one", memory_identity("a", VERSION, "on")), identities[0])
    assert both not in salts


def test_salts_differ_in_each_part() -> None:
    identities = [
        None,
        memory_identity("a", VERSION, "on"),
        memory_identity("a", VERSION, "shadow"),
        memory_identity("a", "cd" * 32, "on"),
    ]
    salts = {cache_salt(tenant, identity) for tenant in ("", "one", "two") for identity in identities}
    assert len(salts) == 12
    assert cache_salt("one", identities[1]) == cache_salt("one", memory_identity("a", VERSION, "on"))


def test_an_architecture_is_that_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        architecture_for(tmp_path)
    for named, expected in (
        (["Qwen3ForCausalLM"], "EngramQwen3ForCausalLM"),
        (["EngramLlamaForCausalLM"], "EngramLlamaForCausalLM"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": named}))
        assert architecture_for(tmp_path) == expected
        assert engine_arguments(tmp_path, POOL)["hf_overrides"] == {"architectures": [expected]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(InvalidArgument, match="GPT2LMHeadModel"):
        architecture_for(tmp_path)


def test_outcomes_and_reports_go_through_json() -> None:
    outcome = RequestOutcome(
        UsedMemory("kjv", VERSION, "mapped", True), 4, 3, 16, "late", True, 0.25, Failure.of(FingerprintMismatch("layers", 4, 5))
    )
    carried = json.loads(json.dumps({"treadle": outcome.to_dict() | {"of_a_later_version": 1}}))
    assert outcome_of(SimpleNamespace(kv_transfer_params=carried)) == outcome
    assert outcome_of(SimpleNamespace(kv_transfer_params=None)) is None
    reports = EngineReports(
        {2: {"tickets": 1}},
        (TicketReport(2, "mapped", True, 16, 0, 0.0, 0.5, None),),
        3,
        (MemoryFigures("kjv", VERSION, "rpc", True, 1, 9),),
        7,
    )
    assert EngineReports.from_dict(json.loads(json.dumps(reports.to_dict()))) == reports


def test_a_failure_is_the_error_again() -> None:
    mismatch = Failure.of(FingerprintMismatch("layers", 4, 5)).error()
    assert isinstance(mismatch, FingerprintMismatch)
    assert (mismatch.field, str(mismatch)) == ("layers", str(FingerprintMismatch("layers", 4, 5)))
    assert type(Failure.of(NotFound("no x")).error()) is NotFound
    assert type(Failure("SomethingNew", "x").error()) is Unavailable


@pytest.mark.parametrize(
    ("cause", "word"),
    [(None, "late"), (errors.DeadlineExceeded(""), "late"), (Unavailable(""), "unavailable"), (errors.DataLoss(""), "damaged"),
     (NotFound(""), "gone"), (errors.ResourceExhausted(""), "refused")],
)  # fmt: skip
def test_why_rows_are_missing_has_a_word(cause: Any, word: str) -> None:
    assert because(cause) == word


def test_importing_the_package_loads_neither_vllm_nor_torch() -> None:
    code = "import sys, treadle.vllm, treadle.vllm.salt, treadle.vllm.outcomes; assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
