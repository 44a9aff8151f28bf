"""A store as its callers meet it, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np
import pytest

from asm_store.domain.checking import NUMBER_MAX
from asm_store.domain.lookup import QUERY_MAX, look_up
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.contract.dictionary import DictionarySettings, Grouping, RowDtype, tensor_name
from treadle.contract.dictionary_file import map_tensors, tensor_offsets
from treadle.contract.errors import Overtaken

if TYPE_CHECKING:
    from tests.conftest import Made, Make, Serve

Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]
Fails = Callable[[Any], Awaitable[tuple[grpc.StatusCode, str, dict[str, str]]]]


def ref(made: Made, digits: int = 64) -> pb.DictionaryRef:
    return pb.DictionaryRef(name=made.name, version=made.version[:digits])


async def test_what_is_published_is_opened_where_it_lies(serve: Serve, make: Make) -> None:
    made = make(prefix_kv=True)
    async with serve() as served:
        answer = await served.publish(made.messages(card_json=b'{"fidelity": 1}', promote=True))
        assert not answer.existed
        assert (answer.dictionary.ref.version, answer.dictionary.current, answer.dictionary.tenant) == (
            made.version,
            True,
            "default",
        )
        opened = await served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules")))
        assert opened.dictionary.card_json == b'{"fidelity": 1}'
        assert opened.fingerprint == made.dictionary.fingerprint.as_dict()
        path = served.parts.folder.path / made.name / made.version / "dictionary.safetensors"
        assert opened.path == str(path)
        assert dict(opened.tensor_offsets) == tensor_offsets(path, made.dictionary)
        mapped = map_tensors(path, made.dictionary, opened.tensor_offsets)
        assert all(np.array_equal(mapped[name], made.tensors[name], equal_nan=True) for name in made.tensors)
        again = await served.publish(made.messages())
        assert (again.existed, again.dictionary.ref.version) == (True, made.version)
        assert served.metric("publishes_total", outcome="ok") == 2


async def test_the_sdk_publishes_opens_and_gets_the_same_bytes(serve: Serve, make: Make, tmp_path: Any) -> None:
    made = make(prefix_kv=True)
    async with serve() as served:
        asm = served.fabric.asm
        published = await asyncio.to_thread(asm.publish, made.folder)
        assert (published.stored.version, published.existed) == (made.version, False)
        mapped = await asyncio.to_thread(asm.open, "rules", None, {"model.digest": made.dictionary.model.digest})
        with mapped:
            assert all(np.array_equal(mapped.tensors[name], made.tensors[name]) for name in made.tensors)
            (listed,) = await asyncio.to_thread(asm.list)
            assert listed.readers == 0  # this process is the store's own
        await asyncio.to_thread(asm.get, "rules", tmp_path / "got")
        for name in ("dictionary.safetensors", "prefix_kv.safetensors", "manifest.json", "card.json"):
            assert (tmp_path / "got" / name).read_bytes() == (made.folder / name).read_bytes()


async def test_another_model_is_refused_with_the_field_that_differs(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        request = pb.OpenRequest(ref=ref(made), expected_fingerprint={"model.rope": "ab" * 32})
        code, text, details = await fails(served.stub.Open(request))
        assert (code, details["treadle-field"]) == (grpc.StatusCode.FAILED_PRECONDITION, "model.rope")
        assert "model.rope" in text


async def test_a_pointer_is_flipped_by_compare_and_set(serve: Serve, make: Make, fails: Fails) -> None:
    first, second = make(seed=1), make(seed=2)
    async with serve() as served:
        await served.publish(first.messages())
        await served.publish(second.messages())
        code, text, _ = await fails(served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules"))))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "means no version" in text
        flip = pb.PromoteRequest(ref=ref(first, 12), expected_version="")
        assert (await served.stub.Promote(flip)).pointer == pb.Pointer(name="rules", version=first.version, revision=1)
        assert (await served.stub.Promote(pb.PromoteRequest(ref=ref(first)))).pointer.revision == 1  # no change
        code, text, details = await fails(served.stub.Promote(pb.PromoteRequest(ref=ref(second), expected_version=second.version)))
        assert (code, details["treadle-error"]) == (grpc.StatusCode.ABORTED, "Overtaken")
        assert first.version in text
        assert second.version in text
        flip = pb.PromoteRequest(ref=ref(second), expected_version=first.version)
        assert (await served.stub.Promote(flip)).pointer.revision == 2
        listed = (await served.stub.List(pb.ListRequest())).dictionaries
        assert [(one.ref.version, one.current) for one in listed] == [(second.version, True), (first.version, False)]


async def test_a_lost_compare_and_set_is_overtaken_to_the_sdk(serve: Serve, make: Make) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        with pytest.raises(Overtaken, match=made.version):
            await asyncio.to_thread(served.fabric.asm.promote, f"rules@{made.version}", "ab" * 32)


async def test_a_watcher_is_told_all_at_once_then_each_change_and_in_silence_that_the_store_lives(
    serve: Serve, make: Make, eventually: Eventually, fails: Fails
) -> None:
    first, second, other = make(seed=1), make(seed=2), make(name="other", seed=3)
    async with serve() as served:
        await served.publish(first.messages(promote=True))
        await served.publish(other.messages(promote=True))
        await served.publish(second.messages())
        watch = served.stub.Watch(pb.WatchRequest(names=["rules"]))
        told = await watch.read()
        assert [(p.name, p.version) for p in told.pointers] == [("rules", first.version)]
        assert told.snapshot_complete
        silences = list[float]()
        while not silences or (silences[-1] >= 2 and len(silences) < 5):  # a busy machine may hold one sign of life up, or two
            begun = asyncio.get_running_loop().time()
            assert await watch.read() == pb.WatchResponse()
            silences.append(asyncio.get_running_loop().time() - begun)
        assert silences[-1] < 2, silences
        await served.stub.Promote(pb.PromoteRequest(ref=ref(second)))
        while not (told := await watch.read()).pointers:
            pass
        assert [(p.version, p.revision, told.snapshot_complete) for p in told.pointers] == [(second.version, 2, False)]
        assert served.metric("watchers") == 1
        watch.cancel()
        await eventually(lambda: served.metric("watchers") == 0, "the watch has ended")
        everything = served.stub.Watch(pb.WatchRequest())
        assert [p.name for p in (await everything.read()).pointers] == ["other", "rules"]
        await served.parts.drain()
        assert (await fails(everything))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_lookup_adds_what_matched_keys_see_to_what_entries_hold(serve: Serve, make: Make, fails: Fails) -> None:
    made = make(settings=DictionarySettings(dtype=RowDtype.F32, entries=16, matched_keys=5), tokens=10)
    dictionary, model = made.dictionary, made.dictionary.model
    queries, rotated = np.random.default_rng(5).standard_normal((2, 7, model.heads, model.head_dim), dtype=np.float32)
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        request = pb.LookupRequest(
            ref=pb.DictionaryRef(name="rules"), layer=2, queries=queries.tobytes(), rotated=rotated.tobytes()
        )
        answer = await served.stub.Lookup(request)
        states = np.frombuffer(answer.states, "<f4").reshape(queries.shape)
        log_z = np.frombuffer(answer.log_z, "<f4").reshape(queries.shape[:2])
        keys, values, biases = (made.tensors[tensor_name(2, part)] for part in ("matched_keys", "matched_values", "matched_biases"))
        for heads in dictionary.heads_of_lookups[0]:
            joined = queries[:, list(heads)].reshape(7, -1)
            entry = (joined @ made.tensors[tensor_name(2, "keys")][0].T).argmax(1)
            for member, head in enumerate(heads):
                group = head // model.group
                weights = np.exp(rotated[:, head] @ keys[group].T / np.sqrt(model.head_dim) + biases[group])
                seen = (weights / weights.sum(1, keepdims=True)) @ values[group]
                np.testing.assert_allclose(
                    states[:, head], seen + made.tensors[tensor_name(2, "states")][0, entry, member], atol=1e-5
                )
                beyond = made.tensors[tensor_name(2, "log_z")][0, entry, member]
                np.testing.assert_allclose(log_z[:, head], np.log(weights.sum(1)) + beyond, rtol=1e-5)
        for wrong in (b"", rotated[:3].tobytes(), (rotated * np.nan).tobytes()):
            code, text, _ = await fails(
                served.stub.Lookup(pb.LookupRequest(ref=request.ref, layer=2, queries=request.queries, rotated=wrong))
            )
            assert (code, "rotated" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text


def test_the_largest_query_behind_the_largest_whitening_finds_what_a_small_one_does(make: Make) -> None:
    most = NUMBER_MAX["whitening"]
    settings = DictionarySettings(heads_joined=3, grouping=Grouping.SHARED, dtype=RowDtype.F32, entries=16, ridge_ppm=9)

    def whitened(by: float) -> Any:
        return make(
            settings=settings, change=lambda found: found.update({name: found[name] * by for name in found if "whitening" in name})
        )

    queries = np.random.default_rng(6).uniform(-1, 1, (5, 6, 8)).astype(np.float32)
    small, large = whitened(1), whitened(most / 2)  # which is 2 on the diagonal
    found = [
        look_up(made.dictionary, made.tensors, 2, queries * np.float32(size), lists_probed=16)
        for made, size in ((small, 1), (large, QUERY_MAX))
    ]
    np.testing.assert_allclose(found[1].cosines, found[0].cosines, atol=1e-5)
    np.testing.assert_array_equal(found[1].log_z, found[0].log_z)
    np.testing.assert_array_equal(found[1].states, found[0].states)


async def test_a_lookup_finds_what_plain_numpy_finds(serve: Serve, make: Make, plain: DictionarySettings, fails: Fails) -> None:
    made = make(settings=plain, tokens=10)
    dictionary, model = made.dictionary, made.dictionary.model
    chance = np.random.default_rng(5)
    queries = chance.standard_normal((7, model.heads, model.head_dim), dtype=np.float32)
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        request = pb.LookupRequest(ref=pb.DictionaryRef(name="rules"), layer=2, queries=queries.tobytes())
        answer = await served.stub.Lookup(request)
        keys, states, log_z = (made.tensors[tensor_name(2, part)] for part in ("keys", "states", "log_z"))
        for place, heads in enumerate(dictionary.heads_of_lookups[0]):
            joined = queries[:, list(heads)].reshape(7, -1)
            cosines = joined @ keys[0].T / np.linalg.norm(joined, axis=1, keepdims=True)
            entry = cosines.argmax(1)
            found = np.frombuffer(answer.states, "<f4").reshape(queries.shape)[:, list(heads)]
            np.testing.assert_array_equal(found, states[0, entry])
            np.testing.assert_array_equal(np.frombuffer(answer.log_z, "<f4").reshape(7, -1)[:, list(heads)], log_z[0, entry])
            told = np.frombuffer(answer.cosines, "<f4").reshape(7, 1, -1)[:, 0, place]
            np.testing.assert_allclose(told, cosines.max(1), atol=1e-5)
        assert answer.log_base == "e"
        for wrong, code, words in (
            (pb.LookupRequest(ref=request.ref, layer=1, queries=request.queries), grpc.StatusCode.NOT_FOUND, "layer 1"),
            (pb.LookupRequest(ref=request.ref, layer=2, queries=b"abc"), grpc.StatusCode.INVALID_ARGUMENT, "queries"),
            (pb.LookupRequest(ref=request.ref, layer=2), grpc.StatusCode.INVALID_ARGUMENT, "queries"),
            (
                pb.LookupRequest(ref=request.ref, layer=2, queries=(queries * np.nan).tobytes()),
                grpc.StatusCode.INVALID_ARGUMENT,
                "NaN",
            ),
            *(
                (
                    pb.LookupRequest(ref=request.ref, layer=2, queries=(np.sign(queries) * size).tobytes()),
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"queries: a number of size {size:g}, at most",
                )
                for size in map(np.float32, (QUERY_MAX * 1.1, 1e25, 3e38))
            ),
        ):
            found_code, text, _ = await fails(served.stub.Lookup(wrong))
            assert (found_code, words in text) == (code, True)
        assert served.metric("lookups_total", outcome="ok") == 1
        assert (await served.stub.Status(pb.StatusRequest())).lookups == 1


async def test_a_pin_ends_when_it_was_said_to_and_is_remembered(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve(pin_seconds_max=100.0) as served:
        await served.publish(made.messages())
        until = (await served.stub.Pin(pb.PinRequest(ref=ref(made), ttl_seconds=50))).pinned_until_seconds
        assert (await served.stub.Pin(pb.PinRequest(ref=ref(made), ttl_seconds=5))).pinned_until_seconds == until  # the longer one
        for ttl in (0.0, -1.0, 101.0, float("nan"), float("inf")):
            code, text, _ = await fails(served.stub.Pin(pb.PinRequest(ref=ref(made), ttl_seconds=ttl)))
            assert (code, "ttl_seconds" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    async with serve() as served:
        (listed,) = (await served.stub.List(pb.ListRequest())).dictionaries
        assert listed.pinned_until_seconds == until
        assert served.metric("versions_pinned") == 1
        await served.stub.Unpin(pb.UnpinRequest(ref=ref(made)))
        (listed,) = (await served.stub.List(pb.ListRequest())).dictionaries
        assert listed.pinned_until_seconds == 0


async def test_delete_says_what_is_gone_and_ends_holds(serve: Serve, make: Make, fails: Fails) -> None:
    first, second = make(seed=1), make(seed=2)
    async with serve() as served:
        await served.publish(first.messages(promote=True))
        await served.publish(second.messages())
        hold = served.stub.Hold(pb.HoldRequest(ref=ref(first)))
        assert (await hold.read()).ref.version == first.version
        folder = served.parts.folder.path / "rules" / first.version
        sizes = {str(path): path.stat().st_size for path in folder.iterdir()}
        answer = await served.stub.Delete(pb.DeleteRequest(ref=ref(first)))
        assert {file.path: file.bytes for file in answer.files} == sizes
        assert all(file.freed and file.replica == served.parts.store.sharing.name for file in answer.files)
        assert not answer.pending_replicas
        assert not folder.exists()
        assert (await fails(hold))[0] is grpc.StatusCode.NOT_FOUND
        watch = served.stub.Watch(pb.WatchRequest())
        (pointer,) = (await watch.read()).pointers
        assert (pointer.version, pointer.revision) == ("", 2)
        watch.cancel()
        assert (await fails(served.stub.Delete(pb.DeleteRequest(ref=ref(first)))))[0] is grpc.StatusCode.NOT_FOUND
        answer = await served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="rules")))
        assert {file.ref.version for file in answer.files} == {second.version}
        assert not (await served.stub.List(pb.ListRequest())).dictionaries
        again = await served.publish(first.messages())  # deleted is not forbidden
        assert not again.existed
    async with serve() as served:
        (listed,) = (await served.stub.List(pb.ListRequest())).dictionaries
        assert listed.ref.version == first.version


async def test_a_version_that_is_mapped_is_deleted_by_name_and_freed_with_its_reader(
    start_store: Any, make: Make, tmp_path: Any
) -> None:
    made = make()
    with start_store(tmp_path / "data") as process:
        asm = process.fabric.asm
        asm.publish(made.folder)
        mapped = asm.open("rules")
        (listed,) = asm.list()
        assert listed.readers == 1
        deleted = asm.delete(f"rules@{made.version}")
        assert not any(file.freed for file in deleted.files)
        assert np.array_equal(mapped.tensors["layers.0.log_z"], made.tensors["layers.0.log_z"])  # as it began
        mapped.close()


async def test_what_a_name_means_outlives_a_restart(serve: Serve, make: Make) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        name = served.parts.store.sharing.name
    async with serve(digests=True) as served:
        opened = await served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules")))
        assert (opened.dictionary.ref.version, opened.dictionary.current) == (made.version, True)
        status = await served.stub.Status(pb.StatusRequest())
        assert (status.versions, status.replica, status.draining) == (1, name, False)
        assert status.file_bytes == status.tenant_bytes["default"] == opened.dictionary.file_bytes
        assert served.metric("file_bytes", tenant="default") == status.file_bytes
