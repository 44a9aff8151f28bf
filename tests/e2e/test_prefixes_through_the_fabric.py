"""A long prefix, with real processes: built and published as a user would, and chosen by a stock OpenAI client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from .conftest import RunningFabric, until

RULES = (
    "Rules of the lending library. A reader may borrow five books for three weeks. Each book may be renewed twice, unless another "
    "reader waits for it. A late book costs ten cents a day, at most four euros. Maps and newspapers are read in the house.\n"
)
QUESTION = "Question: How many books may a reader borrow, and for how long?\nAnswer:"
OFF_TASK = "def quicksort(numbers):\n    if len(numbers) <= 1:\n        return numbers\n    pivot ="
TOKENS = 16
LOOKUPS = 3  # of a token, in a dictionary of the small model that joins no heads: one for each query head of a group


@dataclass(frozen=True)
class Published:
    """A dictionary whose calibration is one question with the answer that it has behind the rules: one entry for each query."""

    answer: str
    version: str
    prefix_tokens: int


def complete(fabric: RunningFabric, prompt: Any, **treadle: Any) -> Any:
    return fabric.client().completions.create(
        model=fabric.model, prompt=prompt, temperature=0, max_tokens=TOKENS, extra_body={"treadle": {"engram": "none"} | treadle}
    )


def prefix_of(answer: Any) -> dict[str, Any]:
    (report,) = [memory for memory in answer.treadle["memory"] if memory["kind"] == "prefix"]
    return dict(report)


@pytest.fixture(scope="module")
def published(fabric: RunningFabric, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder, tokenizer = tmp_path_factory.mktemp("prefix"), Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prefix, question = (tokenizer.encode(text, add_special_tokens=False).ids for text in (RULES, QUESTION))
    answer = complete(fabric, [[*prefix, *question]]).choices[0].text
    trace = tokenizer.encode(QUESTION + answer, add_special_tokens=False).ids
    (folder / "rules.txt").write_text(RULES)
    (folder / "traces.jsonl").write_text(json.dumps({"text": QUESTION + answer}) + "\n")
    built = fabric.run(
        "asm", "build", "--name", "lending-rules", "--prefix", str(folder / "rules.txt"), "--traces", str(folder / "traces.jsonl"),
        "--model", str(model_dir), "--out", str(folder / "made"), "--entries", str(LOOKUPS * len(trace)), "--key", "own-position",
        "--iterations", "0", "--dtype", "F32", "--keep-prefix-kv", "--threads", "1",
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    store = fabric.service("asm-store")["address"]
    sent = fabric.run("asm", "publish", str(folder / "made"), "--store", store, "--json")
    assert sent.returncode == 0, sent.stderr
    return Published(answer, json.loads(sent.stdout)["version"], len(prefix))


def test_a_dictionary_answers_as_the_prefix_in_the_prompt(fabric: RunningFabric, published: Published) -> None:
    plain = complete(fabric, QUESTION)
    behind = complete(fabric, QUESTION, prefix="lending-rules")
    assert behind.choices[0].text == published.answer != plain.choices[0].text
    report = prefix_of(behind)
    assert (report["version"], report["prefix_tokens"]) == (published.version, published.prefix_tokens)
    assert (report["fell_back"], report["missing_because"], behind.treadle["degraded"]) == (False, "", False)
    assert report["lookups"] > 0
    assert behind.usage.prompt_tokens == plain.usage.prompt_tokens  # none of the prefix's tokens is in the prompt
    pinned = complete(fabric, QUESTION, prefix=f"lending-rules@{published.version[:8]}")
    assert pinned.choices[0].text == published.answer


def test_a_prompt_off_its_task_is_answered_as_behind_the_prefix_itself(
    fabric: RunningFabric, published: Published, model_dir: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = [token for text in (RULES, OFF_TASK) for token in tokenizer.encode(text, add_special_tokens=False).ids]
    exact, behind = complete(fabric, [prompt]), complete(fabric, OFF_TASK, prefix="lending-rules")
    assert behind.choices[0].text == exact.choices[0].text
    assert (prefix_of(behind)["fell_back"], behind.treadle["degraded"]) == (True, False)


def test_a_chat_has_a_memory_and_a_prefix_at_once(fabric: RunningFabric, published: Published) -> None:
    answer = fabric.client().chat.completions.create(
        model=fabric.model, messages=[{"role": "user", "content": "May I take a map home?"}], max_tokens=8,
        extra_body={"treadle": {"engram": "kjv", "prefix": "lending-rules"}},
    )  # fmt: skip
    assert [memory["kind"] for memory in answer.treadle["memory"]] == ["engram", "prefix"]  # type: ignore[attr-defined]  # OpenAI's types do not know it
    said = fabric.run("chat", "May I take a map home?", "--prefix", "lending-rules", "--max-tokens", "8", "--json")
    assert said.returncode == 0, said.stderr
    document = json.loads(said.stdout)
    assert (document["prefix"], document["treadle"]["memory"][-1]["kind"]) == ("lending-rules", "prefix")


def test_a_prefix_that_is_not_there_is_refused_by_name(fabric: RunningFabric, published: Published) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(fabric, QUESTION, prefix="borrowing-rules")
    assert (refused.value.param, refused.value.code) == ("treadle.prefix", "prefix_not_found")
    assert "'lending-rules'" in refused.value.message


def test_the_status_lists_the_prefix(fabric: RunningFabric, published: Published) -> None:
    def listed() -> bool:
        headers = {"authorization": "Bearer plain-key"}
        status = httpx.get(f"{fabric.url}/v1/treadle/status", headers=headers, timeout=30, trust_env=False).json()
        return any(prefix["version"] == published.version for worker in status["workers"] for prefix in worker["prefixes"])

    until(listed)
