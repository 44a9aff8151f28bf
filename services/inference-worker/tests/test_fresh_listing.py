"""What was loaded a moment ago is found by the request that names it, though the watch has not told of it yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.lease import Lease
from inference_worker.domain.resident_versions import Choice
from treadle.contract import NotFound, Unavailable

Make = Callable[..., Catalogue]
Take = Callable[..., Lease[EngramMemory]]
Soon = Callable[[Callable[[], bool]], None]
Pool = Any  # conftest's FakePool


def names(catalogue: Catalogue) -> list[str]:
    return [memory.model for memory in catalogue.memories()]


def test_a_name_or_version_that_the_watch_has_not_told_of_is_found_by_asking(fake_pool: Pool, catalogues: Make, take: Take) -> None:
    catalogue = catalogues()
    old = fake_pool.grow("kjv")
    listed = fake_pool.listed
    assert take(catalogue, "kjv").memory is not None
    assert fake_pool.listed == listed + 1
    assert names(catalogue) == ["kjv"]
    new = fake_pool.grow("kjv", seed=1)
    for version in (new.version, old.version):
        memory = take(catalogue, "kjv", version[:8]).memory
        assert memory is not None
        assert memory.version == version
    assert fake_pool.listed == listed + 2  # what is known is not asked for


def test_those_who_ask_before_a_listing_begins_share_it(fake_pool: Pool, catalogues: Make, soon: Soon) -> None:
    catalogue = catalogues()
    listed, fake_pool.hanging_lists = fake_pool.listed, threading.Event()
    first = catalogue.take(Choice("bible"))
    soon(lambda: fake_pool.listed == listed + 1)
    fake_pool.grow("kjv")  # too late for the first, which has begun, or not
    others = [catalogue.take(Choice(name)) for name in ("kjv", "kjv", "tales")]
    others[1].cancel()  # its caller's time was over
    assert not any(each.done() for each in (first, others[0], others[2]))
    fake_pool.hanging_lists.set()
    assert others[0].result(30).memory is not None
    for missing in (first, others[2]):
        with pytest.raises(NotFound, match="there is no memory"):
            missing.result(30)
    assert fake_pool.listed == listed + 2
    assert catalogue.memories()[0].requests == 1


def test_what_the_watch_tells_meanwhile_is_newer_than_a_listing(fake_pool: Pool, catalogues: Make, soon: Soon) -> None:
    fake_pool.grow("kjv")
    catalogue = catalogues()
    fake_pool.hanging_lists = threading.Event()
    listed = fake_pool.listed
    missing = catalogue.take(Choice("bible"))
    soon(lambda: fake_pool.listed == listed + 1)
    catalogue.update([])
    fake_pool.hanging_lists.set()
    with pytest.raises(NotFound, match="there is none to choose"):
        missing.result(30)
    assert names(catalogue) == []


def test_a_pool_that_cannot_be_asked_makes_the_refusal_one_to_come_again_with(
    fake_pool: Pool, catalogues: Make, take: Take
) -> None:
    fake_pool.grow("kjv")
    catalogue = catalogues()
    fake_pool.silent = Unavailable("connection refused")
    with pytest.raises(
        Unavailable, match=r"no memory 'bible' here; there is 'kjv'; the engram pool, .* did not answer: connection refused"
    ):
        take(catalogue, "bible")
    assert take(catalogue, "kjv").memory is not None


def test_a_catalogue_that_closes_tells_who_waits_for_a_listing(fake_pool: Pool, catalogues: Make, soon: Soon) -> None:
    catalogue = catalogues()
    listed, fake_pool.hanging_lists = fake_pool.listed, threading.Event()
    running: Future[Lease[EngramMemory]] = catalogue.take(Choice("kjv"))
    soon(lambda: fake_pool.listed == listed + 1)
    queued: Future[Lease[EngramMemory]] = catalogue.take(Choice("kjv"))
    catalogue.close()
    with pytest.raises(Unavailable, match="stopping"):
        queued.result(30)
    fake_pool.hanging_lists.set()
    with pytest.raises(Unavailable, match="stopping"):
        running.result(30)
    with pytest.raises(Unavailable, match="stopping"):
        catalogue.take(Choice("kjv"))
