"""Which memories a request may choose, which version it gets, and when one is opened and closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.lease import Lease
from inference_worker.domain.memory_opening import FusionFile, Opener
from inference_worker.domain.memory_status import NoCatalogue
from inference_worker.domain.ports import RowHandle
from inference_worker.domain.resident_versions import TOLD_MAX, Choice
from treadle.contract import (
    DataLoss,
    FingerprintMismatch,
    Fusion,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)
from treadle.contract.fusion_mode import FusionMode

Make = Callable[..., Catalogue]
Take = Callable[..., Lease[EngramMemory]]
Soon = Callable[[Callable[[], bool]], None]
Pool = Any  # conftest's FakePool


class Counts:
    """An OpeningObserver."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.refusals: list[str] = []

    def opened(self, outcome: str, seconds: float) -> None:
        self.outcomes.append(outcome)

    def choice_refused(self, reason: str) -> None:
        self.refusals.append(reason)


def names(catalogue: Catalogue) -> list[str]:
    return [memory.model for memory in catalogue.memories()]


def test_a_memory_is_opened_at_first_use_and_shared_then(fake_pool: Pool, catalogues: Make, take: Take) -> None:
    kjv = fake_pool.grow("kjv")
    counts = Counts()
    catalogue = catalogues(observer=counts)
    assert fake_pool.opened == []
    first = take(catalogue, "kjv")
    second = catalogue.take(Choice("kjv"))
    assert second.done()  # open: nothing to wait for
    assert first.memory is second.result().memory
    assert first.memory is not None
    assert (first.memory.version, first.memory.fused) == (kjv.version, True)
    assert fake_pool.opened == [("kjv", kjv.version)]
    assert counts.outcomes == ["ok"]
    (status,) = catalogue.memories()
    assert (status.open, status.requests, status.transport, status.default, status.refusal) == (True, 2, "fake", False, "")


def test_what_another_process_opened_is_let_go_with_its_place(fake_pool: Pool, take: Take, opener: Opener) -> None:
    told: list[tuple[str, str]] = []

    def open_there(handle: RowHandle) -> str:
        told.append(("open", handle.model.name))
        return "there"

    elsewhere = replace(opener, open_elsewhere=open_there, close_elsewhere=lambda handle: told.append(("close", handle.model.name)))
    for name in ("one", "two"):
        fake_pool.grow(name)
    catalogue = Catalogue(fake_pool, elsewhere, open_max=1)
    catalogue.update(fake_pool.resident())
    take(catalogue, "one").release()
    take(catalogue, "two").release()
    catalogue.close()
    assert sorted(told) == [("close", "one"), ("close", "two"), ("open", "one"), ("open", "two")]


def test_none_can_always_be_had_and_is_what_requests_get_without_a_default(catalogues: Make) -> None:
    catalogue = catalogues(heard=False)
    for choice in (None, Choice("")):
        assert catalogue.take(choice).result(0).memory is None
        assert NoCatalogue().take(choice).result(0).memory is None
    assert catalogue.default_memory is None
    with pytest.raises(NotFound, match="without an Engram pool"):
        NoCatalogue().take(Choice("kjv"))


def test_requests_that_wait_for_one_opening_share_it(fake_pool: Pool, catalogues: Make) -> None:
    fake_pool.grow("kjv")
    fake_pool.hanging["kjv"] = threading.Event()
    catalogue = catalogues()
    waiting = [catalogue.take(Choice("kjv")) for _ in range(3)]
    assert not any(each.done() for each in waiting)
    waiting[1].cancel()  # its caller's time was over
    fake_pool.hanging["kjv"].set()
    assert waiting[0].result(30).memory is waiting[2].result(30).memory
    assert len(fake_pool.opened) == 1
    assert catalogue.memories()[0].requests == 2


def test_an_opening_that_hangs_holds_up_no_other_memory(fake_pool: Pool, catalogues: Make, take: Take) -> None:
    for name in ("stuck", "kjv"):
        fake_pool.grow(name)
    fake_pool.hanging["stuck"] = threading.Event()
    catalogue = catalogues()
    stuck = catalogue.take(Choice("stuck"))
    assert take(catalogue, "kjv").memory is not None
    assert not stuck.done()
    fake_pool.hanging["stuck"].set()
    stuck.result(30).release()


@pytest.mark.parametrize("error", [DataLoss("torn"), Unavailable("gone"), ValueError("our bug")])
def test_an_opening_that_fails_is_told_to_those_who_waited_and_tried_again_by_the_next(
    error: Exception, fake_pool: Pool, catalogues: Make, take: Take
) -> None:
    fake_pool.grow("kjv")
    counts = Counts()
    catalogue = catalogues(observer=counts)
    fake_pool.failures["kjv"] = error
    with pytest.raises(Unavailable if isinstance(error, ValueError) else type(error)):
        take(catalogue, "kjv")
    del fake_pool.failures["kjv"]
    assert take(catalogue, "kjv").memory is not None
    assert counts.outcomes == ["failed", "ok"]


def test_a_damaged_version_stands_as_refused_until_it_opens_or_another_comes(
    fake_pool: Pool, catalogues: Make, take: Take, soon: Soon
) -> None:
    old = fake_pool.grow("kjv")
    fake_pool.grow("law", seed=2)
    catalogue = catalogues()

    def refusals() -> dict[str, str]:
        return {memory.model: memory.refusal for memory in catalogue.memories()}

    fake_pool.failures["kjv"] = DataLoss("fusion.safetensors: checksum")
    told = f"engram memory 'kjv', version {old.version}, is damaged: fusion.safetensors: checksum; load it into the pool again"
    with pytest.raises(DataLoss) as refused:
        take(catalogue, "kjv")
    assert str(refused.value) == told
    assert refusals() == {"kjv": told, "law": ""}
    catalogue.update(fake_pool.resident())
    assert refusals()["kjv"] == told
    with pytest.raises(NotFound, match=r"there is 'law'$"):
        take(catalogue, "bible")
    fake_pool.failures.clear()
    assert take(catalogue, "kjv").memory is not None  # repaired
    assert refusals()["kjv"] == ""

    fake_pool.failures["law"] = DataLoss("torn")
    with pytest.raises(DataLoss):
        take(catalogue, "law")
    fake_pool.failures["law"] = Unavailable("gone")  # this says nothing about the new version
    fake_pool.grow("law", seed=3)
    catalogue.update(fake_pool.resident())
    with pytest.raises(Unavailable):
        take(catalogue, "law")
    assert refusals()["law"] == ""


def test_weights_that_are_not_the_manifests_leave_no_handle_open(
    fake_pool: Pool, catalogues: Make, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    kjv, other = fake_pool.grow("kjv"), fake_pool.grow("other", seed=1)
    catalogue = catalogues()
    monkeypatch.setattr(fake_pool, "read_fusion", lambda model, version: other.weights)
    with pytest.raises(FingerprintMismatch, match=r"fusion\.weights"):
        take(catalogue, "kjv")
    assert fake_pool.closed == [("kjv", kjv.version)]


def test_what_is_not_there_is_refused_naming_what_is(fake_pool: Pool, catalogues: Make, take: Take) -> None:
    catalogue = catalogues()
    with pytest.raises(NotFound, match="there is none to choose"):
        take(catalogue, "kjv")
    kjv = fake_pool.grow("kjv")
    fake_pool.grow("law")
    catalogue.update(fake_pool.resident())
    with pytest.raises(NotFound, match=r"there is no memory 'bible' here; there are 'kjv', 'law'"):
        take(catalogue, "bible")
    with pytest.raises(NotFound, match=kjv.version):
        take(catalogue, "kjv", "0" * 12)
    for number in range(TOLD_MAX):
        fake_pool.grow(f"m{number}", seed=number)
    catalogue.update(fake_pool.resident())
    with pytest.raises(NotFound, match="and 2 more") as refused:
        take(catalogue, "x" * 5000)
    assert len(str(refused.value)) < 1000


def test_a_version_may_be_named_by_its_beginning(fake_pool: Pool, catalogues: Make, take: Take) -> None:
    old, new = fake_pool.grow("kjv"), fake_pool.grow("kjv", seed=1)
    catalogue = catalogues()
    for prefix, meant in ((old.version[:8], old), (old.version, old), (new.version[:20], new), ("", new)):
        memory = take(catalogue, "kjv", prefix).memory
        assert memory is not None
        assert memory.version == meant.version
    for wrong in (old.version[:7], "nothexadecimal", old.version + "0"):
        with pytest.raises(InvalidArgument, match=r"engram\.version"):
            catalogue.take(Choice("kjv", wrong))


def test_a_memory_for_another_language_model_is_refused_by_field_and_listed_with_the_reason(
    fake_pool: Pool, catalogues: Make, take: Take
) -> None:
    kjv = fake_pool.grow("kjv")
    fake_pool.put(replace(kjv, model=replace(kjv.model, name="foreign", token_map="0" * 64)))
    fake_pool.put(replace(kjv, model=replace(kjv.model, name="formless", fusion=None)))
    catalogue = catalogues()
    for name, field in (("foreign", "token_map"), ("formless", "fusion")):
        with pytest.raises(FingerprintMismatch) as refused:
            catalogue.take(Choice(name))
        assert refused.value.field == field
    assert {memory.model: bool(memory.refusal) for memory in catalogue.memories()} == {
        "foreign": True,
        "formless": True,
        "kjv": False,
    }
    with pytest.raises(NotFound, match=r"there is 'kjv'$"):
        take(catalogue, "bible")


def test_a_pool_that_never_answered_is_named_with_the_reason_and_what_it_said_last_is_kept(
    fake_pool: Pool, catalogues: Make, take: Take
) -> None:
    fake_pool.grow("kjv")
    catalogue = catalogues(heard=False)
    catalogue.lost("connection refused")
    with pytest.raises(Unavailable, match="fake:1 has not answered yet: connection refused"):
        catalogue.take(Choice("kjv"))
    (status,) = catalogue.memories()
    assert (status.model, status.refusal) == ("", "the engram pool at fake:1 has not answered yet: connection refused")
    catalogue.update(fake_pool.resident())
    catalogue.lost("connection refused")
    assert take(catalogue, "kjv").memory is not None
    assert names(catalogue) == ["kjv"]


def test_a_new_version_is_what_new_requests_get_and_the_old_one_goes_with_its_last_request(
    fake_pool: Pool, catalogues: Make, take: Take, soon: Soon
) -> None:
    old = fake_pool.grow("kjv")
    catalogue = catalogues()
    running, also_running = take(catalogue, "kjv"), take(catalogue, "kjv")
    new = fake_pool.grow("kjv", seed=1)
    catalogue.update(fake_pool.resident())
    soon(lambda: ("kjv", new.version) in fake_pool.opened)  # ahead of the first request
    assert running.memory is not None
    assert running.memory.version == old.version
    later = take(catalogue, "kjv").memory
    assert later is not None
    assert later.version == new.version
    running.release()
    running.release()  # counts once
    assert fake_pool.closed == []
    also_running.release()
    soon(lambda: fake_pool.closed == [("kjv", old.version)])
    assert catalogue.memories()[0].requests == 1

    fake_pool.promote("kjv", old.version)  # rolled back
    catalogue.update(fake_pool.resident())
    back = take(catalogue, "kjv").memory
    assert back is not None
    assert back.version == old.version


def test_the_new_version_of_a_memory_that_is_open_and_idle_is_opened_ahead(
    fake_pool: Pool, catalogues: Make, take: Take, soon: Soon
) -> None:
    old = fake_pool.grow("kjv")
    fake_pool.grow("law", seed=2)
    catalogue = catalogues()
    take(catalogue, "kjv").release()
    new = fake_pool.grow("kjv", seed=1)
    fake_pool.grow("law", seed=3)
    catalogue.update(fake_pool.resident())
    soon(lambda: fake_pool.opened == [("kjv", old.version), ("kjv", new.version)])  # and law, which was not open, is not
    soon(lambda: fake_pool.closed == [("kjv", old.version)])


def test_an_old_version_chosen_by_its_number_goes_with_its_request(
    fake_pool: Pool, catalogues: Make, take: Take, soon: Soon
) -> None:
    old = fake_pool.grow("kjv")
    fake_pool.grow("kjv", seed=1)
    catalogue = catalogues()
    take(catalogue, "kjv", old.version[:8]).release()
    soon(lambda: fake_pool.closed == [("kjv", old.version)])


def test_a_memory_that_disappears_stays_for_those_who_use_it(fake_pool: Pool, catalogues: Make, take: Take, soon: Soon) -> None:
    kjv = fake_pool.grow("kjv")
    fake_pool.grow("law")
    catalogue = catalogues()
    running, idle = take(catalogue, "kjv"), take(catalogue, "law")
    idle.release()
    for name in ("kjv", "law"):
        fake_pool.remove(name)
    catalogue.update(fake_pool.resident())
    soon(lambda: [name for name, _ in fake_pool.closed] == ["law"])
    with pytest.raises(NotFound):
        take(catalogue, "kjv")
    assert names(catalogue) == []
    running.release()
    soon(lambda: ("kjv", kjv.version) in fake_pool.closed)


def test_open_memories_are_bounded_and_the_least_recently_used_gives_its_place(
    fake_pool: Pool, catalogues: Make, take: Take, soon: Soon
) -> None:
    for seed, name in enumerate("abcd"):
        fake_pool.grow(name, seed)
    catalogue = catalogues(open_max=2)
    take(catalogue, "a").release()
    take(catalogue, "b").release()
    used = take(catalogue, "a")  # b is now the least recently used
    also_used = take(catalogue, "c")
    soon(lambda: [name for name, _ in fake_pool.closed] == ["b"])
    with pytest.raises(ResourceExhausted, match="engram_memories_max = 2") as refused:
        catalogue.take(Choice("d"))
    assert refused.value.retry_after_seconds == 1.0
    assert catalogue.open_count == 2
    used.release()
    assert take(catalogue, "d").memory is not None
    also_used.release()
    with pytest.raises(InvalidArgument, match="engram_memories_max"):
        catalogues(open_max=0)


def test_tokens_are_counted_by_name_over_versions_and_openings(fake_pool: Pool, catalogues: Make, take: Take, soon: Soon) -> None:
    for seed, name in enumerate("ab"):
        fake_pool.grow(name, seed)
    catalogue = catalogues(open_max=1)
    for tokens in (5, 7):
        lease = take(catalogue, "a")
        assert lease.memory is not None
        lease.memory.tokens += tokens
        lease.release()
        take(catalogue, "b").release()  # takes a's place
    assert {memory.model: memory.tokens for memory in catalogue.memories()} == {"a": 12, "b": 0}
    fake_pool.remove("a")
    catalogue.update(fake_pool.resident())
    assert catalogue._places._tallies.keys() <= {"b"}


@pytest.fixture
def with_default(fake_pool: Pool, catalogues: Make, opener: Opener) -> Callable[..., Catalogue]:
    """A catalogue with the default `kjv`, opened as at the start."""

    def make(version: str = "") -> Catalogue:
        kjv = next(each for each in fake_pool.resident() if each.version.startswith(version))
        catalogue = catalogues(default=Choice("kjv", version), heard=False)
        catalogue.adopt_default(opener.memory_of(fake_pool, fake_pool.open("kjv", kjv.version)))
        return catalogue

    return make


def version_of_default(catalogue: Catalogue) -> str:
    lease = catalogue.take(None).result(0)  # never waits
    lease.release()
    assert lease.memory is not None
    return lease.memory.version


def test_the_default_follows_its_models_current_version_once_that_is_open(
    fake_pool: Pool, with_default: Callable[..., Catalogue], soon: Soon
) -> None:
    old = fake_pool.grow("kjv")
    catalogue = with_default()
    catalogue.update(fake_pool.resident())
    new = fake_pool.grow("kjv", seed=1)
    fake_pool.hanging["kjv"] = threading.Event()
    catalogue.update(fake_pool.resident())
    assert version_of_default(catalogue) == old.version
    fake_pool.hanging["kjv"].set()
    soon(lambda: version_of_default(catalogue) == new.version)
    soon(lambda: fake_pool.closed == [("kjv", old.version)])
    (status,) = catalogue.memories()
    assert (status.default, status.version, status.requests) == (True, new.version, 0)


def test_a_default_with_a_version_keeps_it(fake_pool: Pool, with_default: Callable[..., Catalogue], take: Take) -> None:
    old = fake_pool.grow("kjv")
    catalogue = with_default(old.version)
    new = fake_pool.grow("kjv", seed=1)
    catalogue.update(fake_pool.resident())
    chosen = take(catalogue, "kjv").memory
    assert chosen is not None
    assert chosen.version == new.version
    assert version_of_default(catalogue) == old.version


def test_a_default_outlives_its_pool_and_its_removal(fake_pool: Pool, with_default: Callable[..., Catalogue], take: Take) -> None:
    kjv = fake_pool.grow("kjv")
    catalogue = with_default()
    catalogue.lost("connection refused")
    assert version_of_default(catalogue) == kjv.version
    assert take(catalogue, "kjv", kjv.version[:8]).memory is catalogue.default_memory  # by its name too
    fake_pool.remove("kjv")
    catalogue.update(fake_pool.resident())
    assert version_of_default(catalogue) == kjv.version
    (status,) = catalogue.memories()
    assert (status.model, status.version, status.refusal) == ("kjv", kjv.version, "")
    for version in ("", kjv.version[:8]):  # what is listed can be chosen
        assert take(catalogue, "kjv", version).memory is catalogue.default_memory
    with pytest.raises(NotFound):
        take(catalogue, "kjv", "0" * 12)
    with pytest.raises(InvalidArgument):
        take(catalogue, "kjv", kjv.version[:2])


def test_a_catalogue_that_closes_closes_what_it_opened_and_tells_who_waits(
    fake_pool: Pool, catalogues: Make, take: Take, soon: Soon
) -> None:
    kjv, stuck = fake_pool.grow("kjv"), fake_pool.grow("stuck", seed=1)
    fake_pool.hanging["stuck"] = threading.Event()
    catalogue = catalogues()
    lease = take(catalogue, "kjv")
    waiting: Future[Lease[EngramMemory]] = catalogue.take(Choice("stuck"))
    soon(lambda: "stuck" in fake_pool.begun)
    catalogue.close()
    with pytest.raises(Unavailable, match="stopping"):
        waiting.result(0)
    assert fake_pool.closed == [("kjv", kjv.version)]
    lease.release()  # too late to matter
    fake_pool.hanging["stuck"].set()
    catalogue._openers.shutdown(wait=True)
    assert fake_pool.closed[1:] == [("stuck", stuck.version)]


def test_an_opening_that_fails_after_the_end_tells_nobody_twice(
    fake_pool: Pool, catalogues: Make, soon: Soon, caplog: pytest.LogCaptureFixture
) -> None:
    fake_pool.grow("stuck")
    fake_pool.hanging["stuck"], fake_pool.failures["stuck"] = threading.Event(), DataLoss("torn")
    catalogue = catalogues()
    waiting: Future[Lease[EngramMemory]] = catalogue.take(Choice("stuck"))
    soon(lambda: "stuck" in fake_pool.begun)
    catalogue.close()
    fake_pool.hanging["stuck"].set()
    catalogue._openers.shutdown(wait=True)
    with pytest.raises(Unavailable, match="stopping"):
        waiting.result(0)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_choices_in_vain_are_counted_by_reason_and_a_pool_that_is_lost_is_seen(
    fake_pool: Pool, catalogues: Make, take: Take
) -> None:
    kjv = fake_pool.grow("kjv")
    counts = Counts()
    catalogue = catalogues(observer=counts, open_max=1, heard=False)
    fake_pool.put(replace(kjv, model=replace(kjv.model, name="foreign", token_map="0" * 64)))
    fake_pool.grow("law", seed=1)
    assert not catalogue.source_answers
    with pytest.raises(Unavailable):
        catalogue.take(Choice("kjv"))
    catalogue.update(fake_pool.resident())
    assert catalogue.source_answers
    take(catalogue, "kjv")
    for wrong in (("bible",), ("foreign",), ("law",), ("kjv", "no-digits")):
        with pytest.raises(TreadleError):
            take(catalogue, *wrong)
    assert counts.refusals == ["no_pool", "unknown", "misfit", "full", "wrong"]
    catalogue.lost("")
    assert not catalogue.source_answers
    assert catalogue.take(Choice("kjv")).done()  # what it said last is kept
    catalogue.update([kjv])
    assert catalogue.source_answers


def test_a_file_of_weights_stands_in_for_the_pools_for_its_memory_alone(fake_pool: Pool, opener: Opener, tmp_path: Any) -> None:
    kjv, law = fake_pool.grow("kjv"), fake_pool.grow("law", seed=1)
    (tmp_path / "fusion").write_bytes(law.weights)
    with_file = replace(opener, weights=FusionFile("kjv", tmp_path / "fusion"))
    with pytest.raises(FingerprintMismatch, match=r"fusion\.weights"):
        with_file.open(fake_pool, kjv.model, kjv.version)
    assert with_file.open(fake_pool, law.model, law.version).fused
    shadow = replace(opener, mode=FusionMode.SHADOW).open(fake_pool, kjv.model, kjv.version)
    assert not shadow.fused
    random = replace(kjv.model, fusion=Fusion("v4.1"))
    assert not opener.is_fused(random)
