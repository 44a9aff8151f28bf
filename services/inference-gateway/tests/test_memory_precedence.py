"""Who has the last word on a request's memory, as plain values."""

from __future__ import annotations

import pytest

from inference_gateway.domain.errors import ModelNotFound, RequestRefused
from inference_gateway.domain.memories import (
    NO_MEMORY,
    WORKERS_DEFAULT,
    Chosen,
    ChosenBy,
    Memory,
    MemoryChoice,
    alias_choice,
    choosable,
    choose,
    parse_choice,
    refusal,
    uses_memory,
    why_not,
)
from treadle.contract.errors import InvalidArgument, Unavailable

VERSION = "1b2c3d4e" * 8
KJV, CODE, OLD_KJV = MemoryChoice("kjv"), MemoryChoice("code"), MemoryChoice("kjv", "0123456789")
MEMORIES = (Memory("kjv", VERSION, default=True), Memory("code", VERSION), Memory("foreign", VERSION, refusal="token_map differs"))


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("kjv", KJV), ("none", NO_MEMORY), ("default", WORKERS_DEFAULT),
        ("kjv@0123abcd", MemoryChoice("kjv", "0123abcd")), ("kjv@0123ABCD", MemoryChoice("kjv", "0123abcd")),
        ("a+b@" + VERSION, MemoryChoice("a+b", VERSION)),
    ],
)  # fmt: skip
def test_a_choice_is_a_name_with_or_without_the_beginning_of_a_version_or_a_word(text: str, choice: MemoryChoice) -> None:
    assert parse_choice(text) == choice


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@0123abcd",
        "kjv@",
        "kjv@0123abc",
        "kjv@0123abcg",
        "kjv@" + "0" * 65,
        "kjv@0123abcd@0123abcd",
        "none@8dd46b5d",
        "default@8dd46b5d",
    ],
)
def test_another_form_is_no_choice(text: str) -> None:
    with pytest.raises(InvalidArgument, match="NAME@VERSION"):
        parse_choice(text)


@pytest.mark.parametrize(("asked", "choice"), [("m", None), ("m+kjv", KJV), ("m+none", NO_MEMORY), ("m+a+b", MemoryChoice("a+b"))])
def test_an_alias_is_the_models_name_with_a_choice_behind_it(asked: str, choice: MemoryChoice | None) -> None:
    assert alias_choice(asked, "m") == choice


def test_a_model_whose_own_name_has_a_plus_is_no_alias() -> None:
    assert alias_choice("m+x", "m+x") is None
    assert alias_choice("m+x+kjv", "m+x") == KJV


@pytest.mark.parametrize("asked", ["another", "another+kjv", "m2", "m+", "m+kjv@1", "x" * 5000])
def test_another_name_is_not_served_and_not_repeated_at_length(asked: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        alias_choice(asked, "m")
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("field", "alias", "key", "chosen"),
    [
        (None, None, None, Chosen(WORKERS_DEFAULT, ChosenBy.DEFAULT)),
        (None, None, CODE, Chosen(CODE, ChosenBy.KEY)),
        (None, KJV, CODE, Chosen(KJV, ChosenBy.ALIAS)),
        (None, NO_MEMORY, CODE, Chosen(NO_MEMORY, ChosenBy.ALIAS)),
        (KJV, None, CODE, Chosen(KJV, ChosenBy.FIELD)),
        (WORKERS_DEFAULT, None, CODE, Chosen(WORKERS_DEFAULT, ChosenBy.FIELD)),
        (CODE, CODE, KJV, Chosen(CODE, ChosenBy.FIELD)),
        (KJV, OLD_KJV, None, Chosen(OLD_KJV, ChosenBy.FIELD)),
        (OLD_KJV, KJV, None, Chosen(OLD_KJV, ChosenBy.FIELD)),
        (WORKERS_DEFAULT, KJV, None, Chosen(WORKERS_DEFAULT, ChosenBy.FIELD)),
    ],
)
def test_field_counts_before_alias_before_key_before_the_workers_default(
    field: MemoryChoice | None, alias: MemoryChoice | None, key: MemoryChoice | None, chosen: Chosen
) -> None:
    assert choose(field, alias, key, MEMORIES) == chosen


@pytest.mark.parametrize(
    ("field", "alias"),
    [
        (KJV, CODE), (NO_MEMORY, KJV), (KJV, NO_MEMORY), (WORKERS_DEFAULT, CODE), (WORKERS_DEFAULT, NO_MEMORY),
        (OLD_KJV, MemoryChoice("kjv", "f" * 8)),
    ],
)  # fmt: skip
def test_field_and_alias_that_disagree_are_refused(field: MemoryChoice, alias: MemoryChoice) -> None:
    with pytest.raises(RequestRefused) as refused:
        choose(field, alias, None, MEMORIES)
    assert (refused.value.param, refused.value.code) == ("treadle.engram", "engram_conflict")


def test_what_speaks_against_a_choice_is_told() -> None:
    assert why_not(KJV, MEMORIES) is None
    assert why_not(NO_MEMORY, ()) is None
    assert why_not(WORKERS_DEFAULT, ()) is None
    assert why_not(MemoryChoice("bible"), MEMORIES) == "there is no memory 'bible' here"
    assert len(why_not(MemoryChoice("x" * 5000), ()) or "") < 1000
    assert "token_map differs" in (why_not(MemoryChoice("foreign"), MEMORIES) or "")


def test_what_is_said_of_one_version_is_not_taken_for_another() -> None:
    assert why_not(OLD_KJV, MEMORIES) is None  # the pool may still have it
    assert why_not(MemoryChoice("foreign", "f" * 8), MEMORIES) is None
    assert why_not(MemoryChoice("foreign", VERSION[:8]), MEMORIES) is not None


def test_what_is_not_known_is_not_called_missing() -> None:
    unheard = (Memory("", "", refusal="the pool has not answered yet"), Memory("smollm2-demo", VERSION, default=True))
    with pytest.raises(Unavailable, match="the pool has not answered yet"):
        why_not(KJV, unheard)
    assert why_not(MemoryChoice("smollm2-demo"), unheard) is None
    assert [memory.name for memory in choosable(unheard)] == ["smollm2-demo"]


def test_the_words_for_none_and_default_are_no_names() -> None:
    reserved = (Memory("none", VERSION), Memory("default", VERSION))
    assert choosable(reserved) == []
    assert why_not(parse_choice("none"), reserved) is None


def test_a_keys_default_that_is_not_there_is_told_as_such() -> None:
    error = refusal(Chosen(KJV, ChosenBy.KEY), "m", "there is no memory")
    assert isinstance(error, RequestRefused)
    assert str(error) == "the default memory of this key: there is no memory"


def test_the_workers_default_is_a_memory_where_it_has_one() -> None:
    assert uses_memory(WORKERS_DEFAULT, MEMORIES)
    assert not uses_memory(WORKERS_DEFAULT, MEMORIES[1:])
    assert uses_memory(CODE, MEMORIES)
    assert not uses_memory(NO_MEMORY, MEMORIES)
