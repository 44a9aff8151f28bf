"""Long prefixes of a real model, through a worker of each engine: the same answers, reports, fallbacks and blocks, and a version that is swapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from worker_processes import Process, Said, request, say, snapshot, until

from asm_store.building.build import Build, Order
from asm_store.building.recipe import Recipe
from treadle.client.asm import AsmStore, Ref
from treadle.client.endpoint import Endpoint
from treadle.client.worker import Worker
from treadle.contract.block_memory import block_memory
from treadle.contract.dictionary import DictionarySettings
from treadle.contract.errors import Unavailable
from treadle.inference.v1 import worker_pb2 as pb
from treadle.nn.model import CausalLM

PREFIX, ON_TASK, OFF_TASK = range(5000, 5090), range(6000, 6070), range(9000, 9080)
DIFFERENCE_MAX = 5e-4
NEAR_TIE = 0.05  # far from a dictionary's task two entries may be equally near: an engine alone and in a batch differs from itself by 0.014
Publish = Callable[..., str]


@pytest.fixture(scope="module")
def asm(store: Process) -> Iterator[AsmStore]:
    with AsmStore(Endpoint(store.listen)) as client:
        yield client


@pytest.fixture(scope="module")
def publish(folder: Path, asm: AsmStore, tmp_path_factory: pytest.TempPathFactory) -> Publish:
    """Builds a dictionary, and makes it what its name means; its version."""
    model = CausalLM.load(folder)

    def make(name: str, *, keep_kv: bool = True, entries: int = 128, prefix: range = PREFIX, promote: bool = True) -> str:
        out = tmp_path_factory.mktemp("dictionary") / name
        traces = tuple(tuple(range(ON_TASK.start + first, ON_TASK.stop + first)) for first in (0, 3, 11))
        recipe = Recipe(name, DictionarySettings(entries=entries), held_out_every=0, keep_prefix_kv=keep_kv)
        Build(Order(recipe, folder, "smollm2-135m", tuple(prefix), traces, out), model=model).run()
        return str(asm.publish(out, promote=promote).stored.version)

    return make


@pytest.fixture(scope="module")
def rules(publish: Publish) -> str:
    return publish("rules")


def behind(tokens: range, prefix: str, memory: str = "", late: Any = None, **sampling: Any) -> pb.GenerateRequest:
    asked = request(tokens.start, len(tokens), memory, **sampling)
    asked.prefix.name = prefix
    asked.memory_policy.wait_seconds_max = 30.0  # else an opening that takes a second on a busy machine degrades the answer
    if late is not None:
        asked.memory_policy.late = late
    return asked


def assert_same(ours: Said, theirs: Said, difference_max: float = DIFFERENCE_MAX) -> None:
    assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
    assert (worst := difference(ours, theirs)) <= difference_max, f"log-probabilities differ by up to {worst:.6f}"
    assert report_of(ours) == report_of(theirs)
    assert ours.last.degraded == theirs.last.degraded


def difference(ours: Said, theirs: Said) -> float:
    both = zip([*ours.logprobs, *ours.prompt_logprobs], [*theirs.logprobs, *theirs.prompt_logprobs], strict=True)
    return max(abs(one.logprob - two.logprob) for one, two in both)


def report_of(said: Said) -> pb.MemoryReport | None:
    return next((each for each in said.last.memory if each.kind == "prefix"), None)


def test_an_answer_behind_a_dictionary_is_the_embedded_engines_and_is_cached(vllm: Worker, embedded: Worker, rules: str) -> None:
    asked = behind(ON_TASK, "rules", salt="on")
    first, again, theirs = say(vllm, asked), say(vllm, asked), say(embedded, asked)
    for ours in (first, again):
        assert_same(ours, theirs)
    report = report_of(first)
    assert report is not None
    assert (report.version, report.prefix_tokens, report.transport, report.fell_back) == (rules, len(PREFIX), "mapped", False)
    assert report.lookups_outside < report.lookups
    assert (first.last.usage.cached_tokens, again.last.usage.cached_tokens) == (0, 64)
    plain = say(vllm, request(ON_TASK.start, len(ON_TASK), "", salt="on"))
    assert plain.last.usage.cached_tokens == 0
    assert plain.tokens != first.tokens
    assert report_of(plain) is None


def test_a_prompt_off_the_task_is_asked_again_behind_the_exact_kv(
    vllm: Worker, embedded: Worker, vllm_process: Process, rules: str
) -> None:
    before = metrics(vllm_process)
    asked = behind(OFF_TASK, "rules", prompt_logprobs=True)
    ours = say(vllm, asked)
    assert_same(ours, say(embedded, asked))
    report = report_of(ours)
    assert report is not None
    assert (report.fell_back, report.missing_because, ours.last.degraded) == (True, "", False)
    assert len(ours.prompt_logprobs) == len(OFF_TASK) - 1  # each once, although the prompt ran twice
    whole = say(embedded, whole_text(OFF_TASK))
    assert ours.tokens == whole.tokens
    after, told = metrics(vllm_process), next(each for each in vllm.status().prefixes if each.name == "rules")
    assert told.fallbacks >= 1
    assert after["prefix_fallbacks_total"] - before["prefix_fallbacks_total"] == 1
    assert after["prefix_lookups_total"] - before["prefix_lookups_total"] == report.lookups
    assert after["requests_total"] - before["requests_total"] == 1


def versions(worker: Worker) -> set[str]:
    return {prefix.version for prefix in worker.status().prefixes}


def whole_text(tokens: range) -> pb.GenerateRequest:
    asked = request(tokens.start, len(tokens), "")
    del asked.prompt_token_ids[:]
    asked.prompt_token_ids.extend([*PREFIX, *tokens])
    return asked


def metrics(process: Process) -> dict[str, float]:
    """Sums over labels, names without `treadle_worker_`."""
    sums: dict[str, float] = {}
    for line in httpx.get(f"http://{process.metrics}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        short = name.partition("{")[0].removeprefix("treadle_worker_")
        if not line.startswith("#"):
            sums[short] = sums.get(short, 0.0) + float(value)
    return sums


def test_one_batch_holds_dictionaries_exact_kv_an_engram_memory_and_none(
    vllm: Worker, embedded: Worker, publish: Publish, rules: str
) -> None:
    publish("guide", prefix=range(7000, 7050))
    asked = [behind(ON_TASK, "rules", "kjv"), behind(ON_TASK, "guide"), request(ON_TASK.start, 70, ""), behind(OFF_TASK, "guide")]
    with ThreadPoolExecutor(len(asked)) as threads:
        together = list(threads.map(lambda each: say(vllm, each), asked))
    for ours, each in zip(together, asked, strict=True):
        assert_same(ours, say(embedded, each))
    assert [report.kind for report in together[0].last.memory] == ["engram", "prefix"]
    fell_back = [report.fell_back for said in together if (report := report_of(said)) is not None]
    assert fell_back == [False, False, True]


def test_without_an_exact_kv_an_answer_is_degraded_or_fails_as_it_asked(vllm: Worker, embedded: Worker, publish: Publish) -> None:
    publish("bare", keep_kv=False)
    differences = []
    for first in (0, 3, 7):
        tokens = range(OFF_TASK.start + first, OFF_TASK.stop + first)
        ours, theirs = (say(worker, behind(tokens, "bare", late=pb.LATE_POLICY_MASK)) for worker in (vllm, embedded))
        assert_same(ours, theirs, NEAR_TIE)
        report = report_of(ours)
        assert report is not None
        assert (ours.last.degraded, report.missing_because) == (True, "off_task")
        differences.append(difference(ours, theirs))
    assert sorted(differences)[1] <= DIFFERENCE_MAX, differences
    for worker in (vllm, embedded):
        with pytest.raises(Unavailable, match="no exact KV is kept"):
            say(worker, behind(OFF_TASK, "bare", late=pb.LATE_POLICY_FAIL))


def test_a_version_is_swapped_while_a_request_runs_and_nothing_fails(
    vllm: Worker, embedded: Worker, publish: Publish, asm: AsmStore
) -> None:
    old, new = publish("moving"), publish("moving", entries=96, promote=False)
    with ThreadPoolExecutor(1) as threads:
        stream = vllm.generate(behind(ON_TASK, "moving", max_tokens=200), 120.0)
        pieces = [next(stream)]
        rest = threads.submit(lambda: [*pieces, *stream])
        asm.promote(Ref("moving", new))
        until(lambda: all(new in versions(worker) for worker in (vllm, embedded)), "the workers hear of it")
        fresh = say(vllm, behind(ON_TASK, "moving", max_tokens=2))
        assert not rest.done()
        running = Said.of(rest.result(120.0))
    told = [report.version for said in (running, fresh) if (report := report_of(said)) is not None]
    assert told == [old, new]
    assert fresh.last.usage.cached_tokens == 0
    assert_same(fresh, say(embedded, behind(ON_TASK, "moving", max_tokens=2)))


def test_blocks_say_behind_which_prefix_they_were_made(vllm: Worker, vllm_process: Process, rules: str) -> None:
    for tokens in (ON_TASK, OFF_TASK):
        say(vllm, behind(tokens, "rules", salt="told"))
    say(vllm, behind(ON_TASK, "rules", "kjv", salt="told"))
    memories = {block.memory for block in snapshot(vllm_process) if block.cache_salt == "told"}
    kjv = next(f"kjv@{memory.version}" for memory in vllm.status().engram_models if memory.model == "kjv")
    rules_at = f"rules@{rules}"
    assert {block_memory(prefix=rules_at), block_memory(prefix=rules_at, exact=True), block_memory(kjv, rules_at)} <= memories
