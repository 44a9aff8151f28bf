"""The demo's second act: its text, what counts as wrong, its tables, and all of it on fake services."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from treadle.cli.demo_prefix import PrefixAct
from treadle.cli.demo_prefix_answers import NAME, QUESTIONS, TEXT_FILE, TRACES_FILE, Asked, Likelihood, Said, likelihood, prompt_of
from treadle.cli.demo_prefix_report import asked_view, built_view, figures_table, origin_words
from treadle.contract.errors import DataLoss
from treadle.inference.v1 import worker_pb2

VERSION = "a5" * 32
PREFIX_TOKENS = 600
REPORT = {
    "kind": "prefix", "name": NAME, "version": VERSION, "lookups": 900, "lookups_outside": 90, "fell_back": False,
    "prefix_tokens": PREFIX_TOKENS,
}  # fmt: skip


def rendered(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def said(text: str, tokens: int, seconds: float = 0.1, cached: int = 0, **treadle: Any) -> Said:
    usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return Said(text, seconds, usage, {"degraded": False, "memory": []} | treadle)


def behind(text: str = " doors", tokens: int = 27, seconds: float = 0.1, degraded: bool = False, **report: Any) -> Said:
    return said(text, tokens, seconds, degraded=degraded, memory=[REPORT | report])


ASKED = Asked("May I?", said(" doors", 627, 1.0), said(" doors", 627, 0.2, 620), said(" a message", 27), behind())


def act_of(**fields: Any) -> PrefixAct:
    figures = {
        "nothing": {"tokens": 99, "agreement": 0.25, "kl": 3.0},
        "dictionary": {"tokens": 99, "agreement": 0.875, "kl": 0.25},
    }
    card = {
        "version": VERSION, "prefix": {"tokens": PREFIX_TOKENS}, "calibration": {"traces": 90, "tokens": 2130}, "fidelity": figures,
        "sizes": {"storage_bytes": 3_200_000, "storage_share": 0.23, "prefix_kv_bytes": 14_200_000},
    }  # fmt: skip
    known: dict[str, Any] = {"card": card, "published": {"version": VERSION, "current": True, "seconds": 0.5}, "asked": [ASKED]}
    return PrefixAct(**(known | {"build_seconds": 21.0, "likelihood": Likelihood(3, -0.5, -9.0, -0.75)} | fields))


def test_no_question_stands_in_the_text_or_in_its_traces_and_all_have_one_form() -> None:
    text = TEXT_FILE.read_text()
    examples = text.split("\n")[:-1:2]
    traces = [json.loads(line) for line in TRACES_FILE.read_text().splitlines()]
    messages = [trace["prompt"].removeprefix("Message: ").removesuffix("\nTopic:") for trace in traces]
    assert [prompt_of(message) for message in messages] == [trace["prompt"] for trace in traces]
    told = [example.removeprefix("Message: ") for example in examples] + messages + list(QUESTIONS)
    assert len(set(told)) == len(told) == 25 + 100 + 4
    topics = {topic.removeprefix("Topic:") + "\n" for topic in text.split("\n")[1::2]}
    assert topics == {trace["answer"] for trace in traces}
    assert len(topics) == 5


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (replace(ASKED, with_text=said(" ", 627)), "nothing is answered with the text"),
        (replace(ASKED, without=said("", 27)), "nothing is answered with neither"),
        (replace(ASKED, behind=behind("")), "nothing is answered behind the prefix"),
        (replace(ASKED, without=said("a", 27, memory=[REPORT])), "without a prefix by a memory that nobody had asked for"),
        (replace(ASKED, with_text=said("a", 627, cached=32)), "32 tokens of the text were cached"),
        (replace(ASKED, again=said("a", 627)), "nothing was cached"),
        (replace(ASKED, behind=said(" doors", 27)), f"does not report {NAME} {VERSION[:12]}"),
        (replace(ASKED, behind=behind(version="b6" * 32)), f"does not report {NAME} {VERSION[:12]}"),
        (replace(ASKED, behind=behind(fell_back=True)), "not used as it should be"),
        (replace(ASKED, behind=behind(lookups=0)), "not used as it should be"),
        (replace(ASKED, behind=behind(degraded=True, missing_because="off_task")), "answered degraded: off_task"),
        (replace(ASKED, behind=behind(tokens=28), with_text=said("a", 628)), "behind the prefix 'May I?' has 28 tokens, alone 27"),
        (replace(ASKED, with_text=said("a", 630)), "the text adds 603 tokens to 'May I?', the dictionary stands for 600"),
    ],
)
def test_what_is_wrong_with_the_answers_to_a_question_is_said(asked: Asked, words: str) -> None:
    assert ASKED.wrong(VERSION, PREFIX_TOKENS) == []
    (told,) = asked.wrong(VERSION, PREFIX_TOKENS)
    assert words in told


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (act_of(published={"version": VERSION, "current": False}), "the store has made"),
        (act_of(card=act_of().card | {"fidelity": None}), "none was measured"),
        (
            act_of(card=act_of().card | {"fidelity": {"dictionary": {"agreement": 0.5}, "nothing": {"agreement": 0.5}}}),
            "not better",
        ),
        (
            act_of(asked=[replace(ASKED, behind=behind(" fees"))]),
            "0 of 1 answers behind it are those of the text in the prompt, 0 with",
        ),
        (act_of(likelihood=Likelihood(3, -0.5, -9.0, -9.0)), "no likelier behind it than without: -9.00, -9.00"),
        (act_of(asked=[replace(ASKED, behind=behind(seconds=1.0))]), "came after 1.00 s, with the text after 1.00 s"),
    ],
)
def test_a_dictionary_that_gains_nothing_is_a_failure(act: PrefixAct, words: str) -> None:
    assert act_of().wrong() == []
    (told,) = act.wrong()
    assert words in told


class _Worker:
    """Scores tokens by what is before them: a thousandth of a nat for each, and behind a prefix twice that."""

    def __init__(self, lost: int = 0) -> None:
        self._lost = lost

    def generate(self, request: worker_pb2.GenerateRequest, timeout_seconds: float) -> Any:
        ids = list(request.prompt_token_ids)
        each = -0.001 * len(ids) * (2 if request.prefix.name == NAME else 1)
        scored = [worker_pb2.TokenLogprob(token_id=token, logprob=each) for token in ids[1 : len(ids) - self._lost]]
        yield worker_pb2.GenerateResponse(prompt_logprobs=scored[:5])
        yield worker_pb2.GenerateResponse(prompt_logprobs=scored[5:])


def words_of(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_the_answers_with_the_text_are_scored_with_it_with_neither_and_behind_the_prefix() -> None:
    two_words = replace(ASKED, with_text=said(" doors please", 628))
    scored = likelihood(_Worker(), words_of, [two_words, replace(ASKED, with_text=said("", 627))])  # type: ignore[arg-type]  # what it uses of one
    alone, text = len(words_of(prompt_of("May I?") + " doors please")), len(words_of(TEXT_FILE.read_text()))
    assert scored.tokens == 2
    assert scored.without == pytest.approx(-0.001 * alone)
    assert scored.behind == pytest.approx(-0.002 * alone)
    assert scored.with_text == pytest.approx(-0.001 * (alone + text))


def test_scores_that_are_missing_are_an_error() -> None:
    with pytest.raises(DataLoss, match=r"log-probabilities of \d+ tokens, not of the"):
        likelihood(_Worker(lost=1), words_of, [ASKED])  # type: ignore[arg-type]  # what it uses of one
    with pytest.raises(DataLoss, match="no answer has a token"):
        likelihood(_Worker(), words_of, [replace(ASKED, with_text=said("", 627))])  # type: ignore[arg-type]  # what it uses of one


def test_figures_and_answers_fit_the_screen() -> None:
    act = act_of()
    text = "\n".join(map(rendered, (built_view(act), asked_view(ASKED), figures_table(act), origin_words(act))))
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    for line in (
        ["doors", "a", "message", "doors"],
        ["prompt", "tokens", "627", "27", "27"],
        ["first", "token,", "median", "1,000", "ms", "100", "ms", "100", "ms"],
        ["text", "cached", "200", "ms"],
        ["same", "answers", "0", "of", "1", "1", "of", "1"],
        ["log-prob", "of", "answers", "-0.50", "-9.00", "-0.75"],
        ["next-token", "agreement", "0.250", "0.875"],
    ):
        assert line in lines
    words = " ".join(text.split())
    for told in (
        "treadle asm build: 21.0 s, from 90 traces",
        "3.2 MB, 23% of the prefix's KV (14.2 MB",
        "900 lookups, 90 unlike its calibration, 0 of 1 sent back",
    ):
        assert told in words


def test_the_demo_builds_publishes_and_asks_and_tells_all_of_it(demo: Any) -> None:
    told = " ".join(demo("demo").stdout.split())
    for words in (
        "A long prefix, club-topics",
        "treadle asm publish: 0.2 s, version a5a5a5a5a5a5",
        f"> {QUESTIONS[0]}",
        "4 of 4",
        "0.875",
    ):
        assert words in told


def test_the_json_document_has_the_second_act(demo: Any) -> None:
    act = json.loads(demo("demo", "--json").stdout)["prefix"]
    assert (act["name"], act["version"], act["entries"]) == (NAME, VERSION, 256)
    assert [answer["question"] for answer in act["answers"]] == list(QUESTIONS)
    assert act["same_answers"] == {"without": 0, "behind": 4}
    assert act["likelihood"]["without"] < act["likelihood"]["behind"]
    assert 0 < act["seconds_to_first"]["behind"] < act["seconds_to_first"]["with_text"]
    assert act["fidelity"]["dictionary"]["agreement"] == 0.875


def test_a_dictionary_that_is_of_no_use_ends_the_demo_with_an_error(demo: Any) -> None:
    demo.extra["FAKE_DICTIONARY"] = "useless"
    run = demo("demo", "--json", code=1)
    failures = "\n".join(json.loads(run.stdout)["failures"])
    for words in ("next-token agreement on held-out traces is not better", "0 of 4 answers behind it", "no likelier behind it"):
        assert words in failures
        assert words in run.stderr


def test_a_build_that_fails_is_a_failure_and_the_rest_goes_on(demo: Any) -> None:
    demo.extra["FAKE_DICTIONARY"] = "unbuilt"
    run = demo("demo", "--json", code=1)
    document = json.loads(run.stdout)
    assert document["prefix"] == {"left_out": "it did not come that far"}
    assert "demo_topics_traces.jsonl is no file of traces" in "\n".join(document["failures"])
    assert set(document["processes"]) == {"engram-pool", "asm-store", "inference-worker", "inference-gateway"}
    assert "nothing in shared memory is left" in run.stderr


def test_on_vllm_the_act_is_played_too(demo: Any) -> None:
    on_vllm = ("demo", "--engine", "vllm", "--worker-command", f"{sys.executable} -m inference_worker")
    document = json.loads(demo(*on_vllm, "--json").stdout)
    assert (document["prefix"]["name"], len(document["prefix"]["answers"])) == (NAME, len(QUESTIONS))
    assert "asm-store" in document["processes"]
