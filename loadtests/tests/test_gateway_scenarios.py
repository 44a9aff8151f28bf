"""The scenarios of the gateway in small: real gateways and workers without a model; figures are for a quiet machine to show."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from treadle.contract.errors import NotFound
from treadle_loadtests import cancel, chat, overload, rolling, trace
from treadle_loadtests.calls import Seen
from treadle_loadtests.report import Report

TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of bytes and a template."""
    folder = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def goal(report: Report, text: str) -> float:
    return next(goal.value for goal in report.goals if goal.text == text)


@pytest.mark.slow
def test_chat_measures_the_gateway_against_the_workers_themselves(model: str) -> None:
    cores = os.sched_getaffinity(0)
    plan = chat.Plan(rate=20.0, seconds=3.0, streams=20, streams_seconds=2.0, stream_tokens=4, ceiling_max=0.0, model=model)
    report = chat.run(plan)
    assert os.sched_getaffinity(0) == cores
    assert report.counts["answers"] > 60
    assert (report.counts["answers_failed"], report.counts["streams_failed"]) == (0, 0), report.reasons
    assert len(report.times["chunk, gateway"]) == 15 * len(report.times["first token, gateway"]) > 0
    assert len(report.times["chunk, straight"]) == 15 * len(report.times["first token, straight"]) > 0
    assert min(report.times["chunk, gateway"]) > 0, "nothing comes before it was made"
    assert report.counts["streams_at_once"] == 20
    assert any("client" in note for note in report.notes)
    assert sum(goal.text.startswith("added") for goal in report.goals) == 4


@pytest.mark.slow
def test_whoever_leaves_stops_the_work(model: str) -> None:
    report = cancel.run(cancel.Plan(disconnects=30, slots=6, model=model))
    assert report.counts["known to a worker"] >= 30
    assert goal(report, "of these not aborted") == 0, report.reasons
    assert report.times["disconnect to abort, streaming"]
    assert report.times["disconnect to abort, not streaming"]
    assert min(map(min, report.times.values())) > 0, "nobody is stopped before the client left"


@pytest.mark.slow
def test_workers_are_restarted_and_no_request_fails(model: str) -> None:
    report = rolling.run(rolling.Plan(workers=2, rounds=1, rate=20.0, real=False, model=model))
    assert report.counts["restarts"] == 2
    assert report.counts["requests"] > 10
    assert report.met, report.lines()


async def test_restarts_that_are_quick_are_followed_by_requests_until_there_were_enough() -> None:
    async def call(number: int) -> Seen:
        return Seen(str(number))

    async def nothing() -> None:
        pass

    seen = await rolling._under_load(call, 1000.0, nothing(), 50)
    assert [each.request_id for each in seen] == [str(number) for number in range(50)]


@pytest.mark.slow
def test_under_three_times_the_load_everybody_is_answered_or_told_to_come_back(model: str) -> None:
    report = overload.run(overload.Plan(seconds=3.0, settle_seconds=1.0, loads=(1.1,), model=model))
    assert report.counts["refused, 3x"] > 0
    assert report.counts["answered, 3x"] > 0
    assert report.counts["refused, 3x, defaults"] > 0
    assert report.counts["answered, 3x, defaults"] > 0
    assert goal(report, "p99 of the time to a first token at 3x / at 80 %, gateway's defaults") > 0
    assert goal(report, "goodput at 3x / peak, gateway's defaults") > 0
    assert sum(note.endswith(", defaults") for note in report.notes) == 1
    assert goal(report, "neither answered nor told to come back") == 0, report.reasons


def written_trace(folder: Path) -> Path:
    """Twelve conversations in turns of ten, each turn with the whole conversation before it."""
    lines = [
        {"timestamp": 400 * turn + 30 * talk, "hash_ids": [0, *(1000 * (talk + 1) + block for block in range(3 * turn + 2))]}
        for turn in range(10)
        for talk in range(12)
    ]
    path = folder / trace.TRACE_FILE
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_routing_by_prefix_comes_near_to_one_cache_of_the_summed_size(model: str, tmp_path: Path) -> None:
    path = written_trace(tmp_path)
    report = trace.run(trace.Plan(path, speed=1.0, workers=3, blocks_max=400, policies=("least-loaded", "prefix"), model=model))
    assert report.counts == {"requests": 240, "requests_failed": 0}, report.reasons
    rates = [float(note.split("hit rate ")[1].split(",")[0]) for note in report.notes if ", " in note and "%" in note]
    assert rates[1] > rates[0], "conversations stay where their beginnings lie"
    assert goal(report, "hit rate of prefix / of one cache of the summed size") > 0.8


def test_the_ideal_counts_each_beginning_that_was_there_and_forgets_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in ([1, 2], [1, 3], [1, 2])))
    asked = trace.read_trace(path, 10, 1.0)
    tokens = 3 * (2 * trace.BLOCK_TOKENS + 1)
    assert trace.ideal_hit_rate(asked, 100) == 3 * trace.BLOCK_TOKENS / tokens
    assert trace.ideal_hit_rate(asked, 2) == 2 * trace.BLOCK_TOKENS / tokens
    assert asked[0].tokens[: trace.BLOCK_TOKENS] == asked[1].tokens[: trace.BLOCK_TOKENS]
    assert asked[0].tokens != asked[1].tokens


def test_a_trace_that_is_not_there_is_told_with_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="kvcache-ai/Mooncake"):
        trace.read_trace(tmp_path, 1, 1.0)
