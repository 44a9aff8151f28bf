"""Which worker is asked first, by each policy, without sockets."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from inference_gateway.adapters.metrics import PrometheusFigures
from inference_gateway.domain import block_following
from inference_gateway.domain.block_following import follow_blocks
from inference_gateway.domain.block_index import BlockChanges, BlockIndex, CachedBlock, Room
from inference_gateway.domain.embedding import Embedding
from inference_gateway.domain.errors import ModelNotFound
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.generation import Generation, MemoryWish, Piece, Sampling, TokenPrompt, WorkerStatus
from inference_gateway.domain.member import Member
from inference_gateway.domain.memories import NO_MEMORY, WORKERS_DEFAULT, Memory, MemoryChoice
from inference_gateway.domain.prefixes import Prefix, PrefixChoice
from inference_gateway.domain.routing import PrefixAware, Routing, SessionAffine, cached_tokens, policy_of
from inference_gateway.domain.served_model import WorkerWatch
from treadle.contract import Deadline
from treadle.contract.block_memory import block_memory
from treadle.contract.errors import ResourceExhausted, TreadleError, Unavailable

BLOCK = 4
PROMPT = tuple(range(41))
KJV = Memory("kjv", "1b" * 32)
RULES = Prefix("rules", "2c" * 32, 900, open=True, requests=0, mapped_bytes=0, fallbacks=0, refusal="")


class FakeWorker:
    """A worker whose status and block events a test sets."""

    def __init__(self, **status: Any) -> None:
        self.told: dict[str, Any] = {
            "model": "m", "model_dir": Path("/m"), "tokenizer_digest": "t", "context_tokens_max": 100, "draining": False,
            "build_version": "0", "pid": 1, "block_tokens": BLOCK,
        } | status  # fmt: skip
        self.away: TreadleError | None = None
        self.events: asyncio.Queue[BlockChanges | TreadleError | None] = asyncio.Queue()
        self.watches = 0

    async def embed(self, request_id: str, texts: Sequence[Sequence[int]], timeout_seconds: float) -> list[bytes]:
        raise AssertionError("nobody asks for vectors here")

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        if self.away is not None:
            raise self.away
        return WorkerStatus(**self.told)

    async def generate(self, generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
        raise NotImplementedError
        yield Piece()

    async def watch_blocks(self, timeout_seconds: float) -> AsyncGenerator[BlockChanges, None]:
        self.watches += 1
        while (event := await self.events.get()) is not None:
            if isinstance(event, TreadleError):
                raise event
            yield event


class Counts:
    """Fits RoutingFigures."""

    def __init__(self) -> None:
        self.by: Counter[str] = Counter()
        self.tokens = (0, 0)

    def routed(self, by: str, cached_tokens: int, possible_tokens: int) -> None:
        self.by[by] += 1
        self.tokens = (self.tokens[0] + cached_tokens, self.tokens[1] + possible_tokens)


def no_encoder(folder: Path, tokenizer_digest: str) -> Any:
    """Nothing is encoded here."""


async def in_thread(work: Callable[[], Any], /) -> Any:
    return work()


async def member(name: str, worker: FakeWorker | None = None, **status: Any) -> Member:
    worker = worker or FakeWorker(**status)
    watch = WorkerWatch(worker, no_encoder, in_thread, interval_seconds=60)
    made = Member(name, worker, watch, blocks=BlockIndex(Room(1000)))
    await watch.poll()
    return made


def stored(tokens: Sequence[int], salt: str = "", memory: str = "") -> list[CachedBlock]:
    """The full blocks of `tokens`."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    names = [hashlib.sha256(repr((salt, memory, tuple(tokens[:end]))).encode()).digest() for end in ends]
    return [
        CachedBlock(names[number], names[number - 1] if number else b"", tokens[end - BLOCK : end], salt, memory)
        for number, end in enumerate(ends)
    ]


def asked(tokens: Sequence[int] = PROMPT, **more: Any) -> Generation:
    given: dict[str, Any] = {"memory": MemoryWish(), "cache_salt": "", "engram": NO_MEMORY, "model": "m"} | more
    return Generation("r", tokens, Sampling(), **given)


def names(members: Sequence[Member]) -> str:
    return "".join(each.name for each in members)


async def test_the_least_loaded_is_asked_first_and_equals_take_turns() -> None:
    a, b, c = [await member(name) for name in "abc"]
    fleet = Fleet([a, b, c], policy_of(Routing.LEAST_LOADED, load_tokens=1, imbalance_max=1))
    a.others, b.in_flight = 2, 1
    assert names(fleet.ranked(asked())) == "cba"
    a.others = b.in_flight = 0
    turns = ""
    for _ in range(6):
        first = fleet.ranked(asked())[0]
        first.begin()
        first.end()
        turns += first.name
    assert turns == "abcabc"


async def test_requests_of_others_are_those_that_a_status_tells_beyond_ours() -> None:
    worker = FakeWorker(requests_running=3, requests_waiting=2)
    a = await member("a", worker)
    assert a.load == 5
    a.begin()
    a.begin()
    await a.watch.poll()
    assert (a.in_flight, a.others, a.load) == (2, 3, 5)
    a.end()
    assert a.load == 4  # known at once, not at the next poll


async def test_a_prompt_goes_to_whom_has_most_of_it() -> None:
    a, b = await member("a"), await member("b")
    figures = Counts()
    fleet = Fleet([a, b], PrefixAware(2, 8), figures=figures)
    a.blocks.apply(BlockChanges(stored=stored(PROMPT[:8])))
    b.blocks.apply(BlockChanges(stored=stored(PROMPT)))
    assert cached_tokens([a, b], asked()) == {a: 8, b: 40}
    assert names(fleet.ranked(asked())) == "ba"
    assert names(fleet.ranked(asked(range(500, 540)))) == "ab"
    assert figures.by == {"hit": 1, "miss": 1}
    assert figures.tokens == (40, 40)
    assert names(fleet.ranked(asked(), avoid=[b])) == "a"
    assert figures.by.total() == 2  # a second choice is not counted again


async def test_a_request_there_weighs_as_much_as_load_tokens_that_are_not_cached() -> None:
    a, b = await member("a"), await member("b")
    fleet = Fleet([a, b], PrefixAware(16, 8))
    b.blocks.apply(BlockChanges(stored=stored(PROMPT)))
    b.in_flight = 2
    assert names(fleet.ranked(asked())) == "ba"  # 1 + 2 x 16 against 41
    b.in_flight = 3
    assert names(fleet.ranked(asked())) == "ab"


async def test_one_popular_beginning_does_not_pile_everybody_onto_one_worker() -> None:
    members = [await member(name) for name in "abcd"]
    figures = Counts()
    fleet = Fleet(members, PrefixAware(0, 3), figures=figures)  # the load weighs nothing: only the bound holds
    members[2].blocks.apply(BlockChanges(stored=stored(PROMPT)))
    for _ in range(100):
        fleet.ranked(asked())[0].begin()
        loads = [each.in_flight for each in members]
        assert max(loads) - min(loads) <= 4
    assert figures.by["fallback"] > 0
    assert figures.by["hit"] > 25


async def test_blocks_of_another_tenant_or_memory_or_version_do_not_count() -> None:
    a = await member("a", memories=(KJV, Memory("base", "0a" * 32, default=True)))
    kjv = f"kjv@{'1b' * 32}"
    a.blocks.apply(BlockChanges(stored=stored(PROMPT, "tenant", kjv)))
    for choice, salt, expected in [
        (MemoryChoice("kjv"), "tenant", 40),
        (MemoryChoice("kjv", "1b1b1b1b"), "tenant", 40),
        (MemoryChoice("kjv", "ffffffff"), "tenant", 0),
        (MemoryChoice("kjv"), "", 0),
        (MemoryChoice("unknown"), "tenant", 0),
        (NO_MEMORY, "tenant", 0),
        (WORKERS_DEFAULT, "tenant", 0),
    ]:
        assert cached_tokens([a], asked(engram=choice, cache_salt=salt))[a] == expected
    a.blocks.apply(BlockChanges(stored=stored(PROMPT, "", f"base@{'0a' * 32}")))
    assert cached_tokens([a], asked(engram=WORKERS_DEFAULT))[a] == 40


async def test_blocks_made_behind_a_prefix_count_for_requests_with_that_version_of_it() -> None:
    a = await member("a", prefixes=(RULES,), memories=(KJV,))
    rules, kjv = f"rules@{'2c' * 32}", f"kjv@{'1b' * 32}"
    a.blocks.apply(BlockChanges(stored=stored(PROMPT, "", block_memory(prefix=rules))))
    for choice, expected in [
        (PrefixChoice("rules"), 40), (PrefixChoice("rules", "2c2c2c2c"), 40), (PrefixChoice("rules", "ffffffff"), 0),
        (PrefixChoice("guide"), 0), (None, 0),
    ]:  # fmt: skip
        assert cached_tokens([a], asked(memory=MemoryWish(prefix=choice)))[a] == expected
    both = asked(memory=MemoryWish(prefix=PrefixChoice("rules")), engram=MemoryChoice("kjv"))
    assert cached_tokens([a], both)[a] == 0
    a.blocks.apply(BlockChanges(stored=stored(PROMPT, "", block_memory(kjv, rules))))
    assert cached_tokens([a], both)[a] == 40
    a.blocks.apply(BlockChanges(cleared=True, stored=stored(PROMPT, "", block_memory(prefix=rules, exact=True))))
    assert cached_tokens([a], asked(memory=MemoryWish(prefix=PrefixChoice("rules"))))[a] == 0  # the dictionary is tried first


async def test_whoever_has_the_prefix_that_is_asked_for_comes_first() -> None:
    a, b = await member("a"), await member("b", prefixes=(RULES,))
    b.in_flight = 5
    assert names(Fleet([a, b]).ranked(asked(memory=MemoryWish(prefix=PrefixChoice("rules"))))) == "ba"


async def test_whoever_has_the_memory_that_is_asked_for_comes_first() -> None:
    a, b = await member("a"), await member("b", memories=(KJV,))
    b.in_flight = 5
    assert names(Fleet([a, b]).ranked(asked(engram=MemoryChoice("kjv")))) == "ba"
    assert names(Fleet([a, b]).ranked(asked())) == "ab"


async def test_a_session_stays_where_it_is_and_moves_only_where_its_worker_goes() -> None:
    members = {name: await member(name) for name in "abcd"}
    fleet = Fleet(list(members.values()), SessionAffine(4))
    homes = {str(number): fleet.ranked(asked(session=str(number)))[0].name for number in range(200)}
    assert min(Counter(homes.values()).values()) > 200 / 4 / 2  # all have their share
    assert homes == {session: fleet.ranked(asked(session=session))[0].name for session in homes}
    fleet.remove("c")
    moved = {session: fleet.ranked(asked(session=session))[0].name for session in homes}
    assert all(moved[session] == home for session, home in homes.items() if home != "c")
    assert len({moved[session] for session, home in homes.items() if home == "c"}) > 1


async def test_a_session_whose_worker_has_too_much_to_do_falls_to_its_next() -> None:
    members = [await member(name) for name in "abc"]
    figures = Counts()
    fleet = Fleet(members, SessionAffine(2), figures=figures)
    home, following, _ = fleet.ranked(asked(session="s"))
    home.in_flight = 3
    assert fleet.ranked(asked(session="s"))[0] is following
    home.in_flight = 2
    assert fleet.ranked(asked(session="s"))[0] is home
    home.worker.told |= {"requests_waiting": 4, "requests_waiting_max": 4, "requests_running": 0}  # type: ignore[attr-defined]
    await home.watch.poll()
    home.others = 0
    assert fleet.ranked(asked(session="s"))[0] is following  # it would refuse the request
    assert figures.by == {"affinity": 2, "fallback": 2}
    fleet.ranked(asked())
    assert figures.by["load"] == 1  # without a session


async def test_a_worker_that_differs_is_left_out_with_the_field_and_comes_back_when_it_fits() -> None:
    odd = FakeWorker(context_tokens_max=50)
    a, b = await member("a"), await member("b", odd)
    fleet = Fleet([a, b])
    assert names(fleet.usable()) == "a"
    assert b.state == "differs"
    assert b.not_usable_because() == "the worker serves another context_tokens_max than the others of its model"
    odd.told["context_tokens_max"] = 100
    await b.watch.poll()
    assert names(fleet.usable()) == "ab"
    assert b.state == "ready"


async def test_the_first_that_is_ready_says_what_the_model_is() -> None:
    first = FakeWorker(tokenizer_digest="another")
    a, b = await member("a", first), await member("b")
    fleet = Fleet([a, b])
    assert names(fleet.usable()) == "a"
    first.away = Unavailable("gone")
    await a.watch.poll()
    assert names(fleet.usable()) == "b"


async def test_models_are_grouped_by_name_and_requests_stay_within_their_group() -> None:
    a, b, c = await member("a"), await member("b", model="n", context_tokens_max=7), await member("c")
    fleet = Fleet([a, b, c])
    assert [model.name for model in fleet.models()] == ["m", "n"]
    assert names(fleet.ranked(asked())) == "ac"
    assert names(fleet.ranked(asked(model="n"))) == "b"
    assert (await fleet.confirmed("n+kjv")).context_tokens_max == 7
    with pytest.raises(ModelNotFound, match="'o' is not served here; 'm', 'n' are"):
        await fleet.confirmed("o")


async def test_a_model_whose_workers_are_all_away_is_unavailable_and_not_unknown() -> None:
    lost = FakeWorker(model="n")
    a, b = await member("a"), await member("b", lost)
    fleet = Fleet([a, b])
    lost.away = Unavailable("cable")
    await b.watch.poll()
    following = asyncio.create_task(fleet.run())
    try:
        with pytest.raises(Unavailable, match="no worker is ready: cable"):
            await fleet.confirmed("n")
        assert fleet.not_ready_because() is None  # the other one is served
        lost.away = None
        assert (await fleet.confirmed("n")).name == "n"
    finally:
        following.cancel()


async def test_the_models_memories_are_those_of_all_its_workers() -> None:
    refused = Memory("kjv", "1b" * 32, refusal="no")
    a = await member("a", memories=(Memory("base", "0a" * 32, default=True), refused))
    b = await member("b", memories=(KJV, Memory("other", "0b" * 32, default=True)))
    model = await Fleet([a, b]).confirmed("m")
    assert [(memory.name, memory.default, memory.refusal) for memory in model.memories] == [
        ("base", True, ""), ("kjv", False, ""), ("other", False, ""),
    ]  # fmt: skip


async def test_a_fleet_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_gateway.domain.fleet.MEMBERS_MAX", 1)
    fleet = Fleet([await member("a")])
    with pytest.raises(ResourceExhausted, match="1 workers are the most"):
        fleet.add(await member("b"))


async def test_a_member_that_left_is_told_of_its_last_request() -> None:
    a, gone = await member("a"), list[str]()
    a.begin()
    a.begin()
    a.when_idle(lambda: gone.append("a"))
    a.end()
    assert gone == []
    a.end()
    assert gone == ["a"]


async def test_a_member_that_left_is_told_of_its_last_request_for_vectors_too() -> None:
    gone = list[str]()

    class VectorWorker(FakeWorker):
        async def embed(self, request_id: str, texts: Sequence[Sequence[int]], timeout_seconds: float) -> list[bytes]:
            a.when_idle(lambda: gone.append("a"))  # it leaves while it works
            assert (a.in_flight, gone) == (1, [])
            return [b"" for _ in texts]

    a = await member("a", VectorWorker(embedding_dim=2))
    embedding = Embedding(Fleet([a]), in_thread, PrometheusFigures(CollectorRegistry()), 60.0)
    plan = await embedding.plan("m", [TokenPrompt((1, 2))], None)
    await embedding.vectors(plan, "r", Deadline.after(10))
    assert (a.in_flight, gone) == (0, ["a"])


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # what is waited for says nothing when it comes
            await asyncio.sleep(0.005)


async def test_an_index_follows_its_worker_and_is_empty_while_that_cannot_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_following, "RETRY_SECONDS_FIRST", 0.01)
    worker = FakeWorker()
    a = await member("a", worker)
    following = asyncio.create_task(follow_blocks(a))
    try:
        worker.events.put_nowait(BlockChanges(stored=stored(PROMPT), snapshot_complete=True))
        await until(lambda: a.blocks.complete)
        assert cached_tokens([a], asked())[a] == 40
        worker.events.put_nowait(Unavailable("cable"))
        await until(lambda: worker.watches == 2)
        assert cached_tokens([a], asked())[a] == 0
        worker.events.put_nowait(BlockChanges(stored=stored(PROMPT[:8]), snapshot_complete=True))
        await until(lambda: a.blocks.complete)
        assert cached_tokens([a], asked())[a] == 8
        worker.events.put_nowait(None)  # an end without an error
        await until(lambda: worker.watches == 3)
        assert len(a.blocks) == 0
    finally:
        following.cancel()


async def test_a_worker_that_falls_silent_is_not_believed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_following, "RETRY_SECONDS_FIRST", 0.01)
    monkeypatch.setattr(block_following, "SILENCE_SECONDS_MAX", 0.05)
    worker = FakeWorker()
    a = await member("a", worker)
    following = asyncio.create_task(follow_blocks(a))
    try:
        worker.events.put_nowait(BlockChanges(stored=stored(PROMPT), snapshot_complete=True))
        await until(lambda: a.blocks.complete)
        await until(lambda: len(a.blocks) == 0)
    finally:
        following.cancel()
