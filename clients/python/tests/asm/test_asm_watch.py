"""Watches: what changed is told over restarts, refusals and silence of the store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.client import AsyncFabric, Fabric
from treadle.client.asm import AsmStore, Pointer
from treadle.client.asm.watching import BACKOFF_SECONDS_MAX, BEHIND_SECONDS, SILENCE_SECONDS, Backoff, PointerBook
from treadle.contract import AccessDenied

if TYPE_CHECKING:
    from tests.asm.conftest import ScriptedStore


DEADLINE_SECONDS = 20.0


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def told(*pointers: tuple[str, str, int], complete: bool = True) -> pb.WatchResponse:
    return pb.WatchResponse(
        pointers=[pb.Pointer(name=n, version=v, revision=r) for n, v, r in pointers], snapshot_complete=complete
    )


def test_a_watch_tells_what_changed_over_a_restart_of_the_store(asm: AsmStore, scripted: ScriptedStore) -> None:
    end = threading.Event()

    def lasting() -> Iterator[pb.WatchResponse]:
        yield told(("a", "3", 4))
        end.wait(DEADLINE_SECONDS)

    scripted.watches = [
        iter([told(("a", "1", 1), complete=False), told(("b", "1", 1)), pb.WatchResponse(), told(("a", "2", 2), complete=False)]),
        iter([told(("a", "3", 4))]),  # after a restart: b is gone, a has moved on
        lasting(),
    ]
    watch = asm.watch()
    items = iter(watch)
    assert next(items) == (Pointer("a", "1", 1), Pointer("b", "1", 1))
    assert next(items) == (Pointer("a", "2", 2),)
    assert next(items) == (Pointer("a", "3", 4), Pointer("b", "", 1))

    def cancel_the_third() -> None:
        try:
            until(lambda: scripted.watching == 3 and watch.connected)
        finally:
            watch.cancel()

    third = threading.Thread(target=cancel_the_third)
    third.start()
    assert next(items, None) is None  # the third tells nothing new, and the watch is over
    third.join()
    assert scripted.watching == 3
    end.set()


def test_a_watch_of_a_store_without_pointers_says_so_at_once(asm: AsmStore, scripted: ScriptedStore) -> None:
    scripted.watches = [iter([told()])]
    watch = asm.watch()
    assert next(iter(watch)) == ()
    watch.cancel()


def test_a_watch_that_may_not_be_ends_with_the_refusal(asm: AsmStore, scripted: ScriptedStore) -> None:
    scripted.refusal = (grpc.StatusCode.UNAUTHENTICATED, ())
    with pytest.raises(AccessDenied):
        next(iter(asm.watch()))


def test_a_watch_ends_with_its_channel(scripted: ScriptedStore, asm: AsmStore) -> None:
    with Fabric(asm="127.0.0.1:1") as fabric:
        watch = fabric.asm.watch()
        over = threading.Thread(target=lambda: list(watch), daemon=True)
        over.start()
        until(lambda: watch._call is not None)
    over.join(DEADLINE_SECONDS)
    assert not over.is_alive()


def test_a_silent_store_is_asked_again(asm: AsmStore, scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def silent() -> Iterator[pb.WatchResponse]:
        yield told(("a", "1", 1))
        end.wait(DEADLINE_SECONDS)

    scripted.watches = [silent(), *(iter([told(("a", "2", 2))]) for _ in range(50))]  # on a slow machine it may seem silent again
    items = iter(asm.watch())
    assert next(items) == (Pointer("a", "1", 1),)
    monkeypatch.setattr("treadle.client.asm.watching.SILENCE_SECONDS", 0.2)  # only now: its first words may take their time
    begun = time.monotonic()
    assert next(items) == (Pointer("a", "2", 2),)
    assert time.monotonic() - begun < DEADLINE_SECONDS, "the silent call was not given up, it ended by itself"
    items.close()
    end.set()


def test_who_takes_long_over_what_it_was_told_is_not_cut_off(
    asm: AsmStore, scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def flipped_later() -> Iterator[pb.WatchResponse]:
        yield told(("a", "1", 1))
        go_on.wait(DEADLINE_SECONDS)
        yield told(("a", "2", 2))

    scripted.watches = [flipped_later(), iter([told(("a", "2", 2))])]
    watch = asm.watch()
    items = iter(watch)
    assert next(items) == (Pointer("a", "1", 1),)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("treadle.client.asm.watching.SILENCE_SECONDS", 0.2)
        watch._heard.set()  # whoever listens for silence begins anew, for so long
        time.sleep(1.0)
    go_on.set()
    assert (next(items), scripted.watching) == ((Pointer("a", "2", 2),), 1)
    items.close()


def test_a_watch_that_is_refused_for_now_keeps_the_reason(asm: AsmStore, scripted: ScriptedStore) -> None:
    scripted.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, ())
    watch = asm.watch()
    waiting = threading.Thread(target=lambda: list(watch), daemon=True)
    waiting.start()
    until(lambda: "said so" in watch.trouble)
    watch.cancel()
    waiting.join(DEADLINE_SECONDS)
    assert (waiting.is_alive(), watch.connected) == (False, False)


def test_a_watch_that_is_cancelled_as_it_begins_to_listen_ends_at_once(asm: AsmStore, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = asm.watch()

    class Heard(threading.Event):
        def clear(self) -> None:
            watch.cancel()
            super().clear()

    monkeypatch.setattr(watch, "_heard", Heard())
    listening = threading.Thread(target=watch._listen, daemon=True)
    listening.start()
    listening.join(SILENCE_SECONDS / 2)
    assert not listening.is_alive()


async def test_a_watch_from_asyncio_comes_back_and_ends_with_a_refusal(asm: AsmStore, scripted: ScriptedStore) -> None:
    async with AsyncFabric(asm=asm._endpoint.address) as fabric:
        scripted.watches = [iter([told(("a", "1", 1))]), iter([told(("a", "2", 2))])]
        async with asyncio.timeout(DEADLINE_SECONDS), aclosing(fabric.asm.watch()) as items:
            assert [await anext(items), await anext(items)] == [(Pointer("a", "1", 1),), (Pointer("a", "2", 2),)]
        scripted.refusal = (grpc.StatusCode.UNAUTHENTICATED, ())
        with pytest.raises(AccessDenied):
            await anext(fabric.asm.watch())


def test_waits_between_attempts_grow_to_a_limit_and_are_spread() -> None:
    backoff = Backoff(lambda: 1.0)
    waits = [backoff.next_seconds() for _ in range(10)]
    assert waits == sorted(waits)
    assert waits[-1] == BACKOFF_SECONDS_MAX
    backoff.reset()
    assert backoff.next_seconds() == waits[0]
    assert Backoff(lambda: 0.0).next_seconds() == waits[0] / 2


def test_a_list_that_was_cut_off_is_not_believed() -> None:
    book = PointerBook()
    assert book.take(told(("a", "1", 1))) == (Pointer("a", "1", 1),)
    book.restart()
    assert book.take(told(("b", "1", 1), complete=False)) is None
    book.restart()  # the store went away in between: nothing of that list counts
    assert book.take(told(("a", "1", 1))) is None


def test_names_that_are_gone_are_told_once_and_forgotten() -> None:
    book = PointerBook()
    for number in range(3):
        book.restart()
        changed = book.take(told((f"name-{number}", "1", 1)))
        gone = (Pointer(f"name-{number - 1}", "", 1),) if number else ()
        assert changed == (Pointer(f"name-{number}", "1", 1), *gone)
    assert list(book.known) == ["name-2"]


def test_a_replica_that_lags_behind_tells_no_change() -> None:
    now = 0.0
    book = PointerBook(lambda: now)
    assert book.take(told(("a", "2", 2), ("b", "1", 1))) is not None
    book.restart()
    assert book.take(told(("a", "1", 1), ("b", "1", 1))) is None  # another replica, which has not heard of the last flip
    now = BEHIND_SECONDS - 1
    assert book.take(pb.WatchResponse()) is None
    assert book.take(told(("a", "2", 2))) is None  # now it has
    now = 2 * BEHIND_SECONDS
    assert book.take(pb.WatchResponse()) is None
    assert book.take(told(("a", "3", 3))) == (Pointer("a", "3", 3),)


def test_a_store_that_counts_from_the_beginning_again_is_believed_after_a_while() -> None:
    now = 0.0
    book = PointerBook(lambda: now)
    assert book.take(told(("a", "5", 5), ("b", "1", 1))) is not None
    for _ in range(3):
        book.restart()
        assert book.take(told(("a", "1", 1), ("b", "1", 1))) is None
        now += BEHIND_SECONDS / 3
    assert book.take(pb.WatchResponse()) == (Pointer("a", "1", 1),)
    assert book.take(told(("a", "2", 2))) == (Pointer("a", "2", 2),)
    assert (book.take(pb.WatchResponse()), book._behind) == (None, {})
