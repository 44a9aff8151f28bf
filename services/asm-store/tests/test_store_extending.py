"""Entries of two chunks become one: the mathematics, and the version that a store makes of it."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from asm_store.domain.extending import extended, write_extended
from asm_store.domain.merging import at_rest, merge_entries
from asm_store.domain.tenancy import Caller
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.contract.dictionary import ChunkMerge, DictionaryModel, DictionarySettings, Grouping, RowDtype, tensor_name
from treadle.contract.dictionary_file import TENSORS_FILE, map_tensors, write_tensors
from treadle.contract.errors import InvalidArgument
from treadle.kernels import as_numbers

if TYPE_CHECKING:
    from tests.conftest import Make, Serve

Fails = Callable[[Any], Awaitable[tuple[grpc.StatusCode, str, dict[str, str]]]]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
SUM, MEAN = ChunkMerge.SUM, ChunkMerge.MEAN


def f32(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def attention(q: NDArray[np.float64], keys: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[Any, Any]:
    scores = keys @ q
    log_z = np.logaddexp.reduce(scores)
    return (np.exp(scores - log_z) @ values).astype(np.float32), np.float32(log_z)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_the_sum_is_the_attention_over_both_parts(seed: int, low: float, high: float) -> None:
    chance = np.random.default_rng(seed)
    q, keys, values = chance.standard_normal(4), chance.standard_normal((9, 4)), chance.standard_normal((9, 3))
    (a1, l1), (a2, l2), (a, whole) = (attention(q, keys[part], values[part]) for part in (slice(0, 4), slice(4, 9), slice(0, 9)))
    states, log_z = merge_entries(a1[None], l1[None], a2[None], l2[None], how=SUM, chunks=(1, 1))
    np.testing.assert_allclose(states[0], a, atol=1e-5)
    np.testing.assert_allclose(log_z[0], whole, atol=1e-5)
    far, far_z = merge_entries(a1[None], f32([low]), a2[None], f32([high]), how=SUM, chunks=(1, 1))
    assert np.isfinite(far).all()
    assert abs(far_z[0] - np.logaddexp(np.float32(low), np.float32(high))) <= 1e-3
    back, back_z = merge_entries(a2[None], f32([high]), a1[None], f32([low]), how=SUM, chunks=(1, 1))
    np.testing.assert_allclose(back, far, atol=1e-6)
    assert back_z == far_z


def test_the_mean_weighs_chunks_and_leaves_out_what_has_no_samples() -> None:
    a1, a2 = f32([[1.0]]), f32([[3.0]])
    states, log_z = merge_entries(a1, f32([0]), a2, f32([np.log(2)]), how=MEAN, chunks=(3, 1))
    assert states[0, 0] == pytest.approx((3 * 1 + 2 * 3) / 5)
    assert log_z[0] == pytest.approx(np.log((3 * 1 + 2) / 4))
    for how in (SUM, MEAN):
        states, log_z = merge_entries(a1, f32([-np.inf]), a2, f32([0.5]), how=how, chunks=(3, 1))
        assert (states[0, 0], log_z[0]) == (pytest.approx(3.0), pytest.approx(0.5))
        states, log_z = merge_entries(a1, f32([-np.inf]), a2, f32([-np.inf]), how=how, chunks=(3, 1))
        assert (states[0, 0], log_z[0]) == (0.0, -np.inf)


def test_rows_too_large_for_their_scales_are_refused_and_not_kept_as_infinity() -> None:
    with pytest.raises(InvalidArgument, match="too large for int8 rows"):
        at_rest(np.full((1, 4), 1e8, np.float32), RowDtype.I8)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e3))
def test_rows_at_rest_come_back_within_half_a_step(seed: int, size: float) -> None:
    rows = (np.random.default_rng(seed).standard_normal((5, 16)) * size).astype(np.float32)
    rows[2] = 0
    for dtype, step in ((RowDtype.F32, 0.0), (RowDtype.BF16, 2**-8), (RowDtype.I8, 0.5 / 127 * 1.01)):
        resting, scales = at_rest(rows, dtype)
        worst = np.abs(as_numbers(resting, scales) - rows).max(1)
        smallest = 2.0**-24 * 64 if dtype is RowDtype.I8 else 0.0  # fp16 scales have no smaller steps
        assert (worst <= step * np.abs(rows).max(1) + smallest).all()


CASES = [
    DictionarySettings(heads_joined=1, grouping=Grouping.SHARED, dtype=RowDtype.F32, entries=16, chunk_merge=SUM),
    DictionarySettings(
        heads_joined=3, grouping=Grouping.INDIVIDUAL, dtype=RowDtype.I8, entries=32, lists=4, ridge_ppm=9, chunk_merge=MEAN
    ),
    DictionarySettings(heads_joined=1, grouping=Grouping.INDIVIDUAL, dtype=RowDtype.BF16, entries=24, lists=3, chunk_merge=SUM),
]


@pytest.mark.parametrize("case", CASES, ids=["F32", "I8", "BF16"])
async def test_a_store_extends_a_version_entry_by_entry_and_leaves_it_as_it_was(serve: Serve, make: Make, case: Any) -> None:
    base = make(seed=1, settings=case, prefix_kv=True)
    chunk = make(seed=2, settings=case, name="chunk", prefix_text="second", tokens=11, first=40)
    async with serve() as served:
        for made in (base, chunk):
            await served.publish(made.messages(promote=made is base))
        answer = await asyncio.to_thread(served.fabric.asm.extend, "rules", f"chunk@{chunk.version}", promote=True)
        opened = await served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules")))
        assert opened.dictionary.ref.version == answer.version
        found = extended(base.dictionary, chunk.dictionary)
        assert (found.prefix.tokens, found.prefix.chunks, found.prefix_kv) == (51, (40, 11), None)
        mapped = map_tensors(Path(opened.path), found)
        for layer in found.layers:
            names = {part: tensor_name(layer, part) for part in ("keys", "states", "state_scales", "log_z", "counts")}
            assert np.array_equal(mapped[names["keys"]], base.tensors[names["keys"]])
            numbers = [
                as_numbers(tensors[names["states"]], tensors.get(names["state_scales"]))
                for tensors in (base.tensors, chunk.tensors, mapped)
            ]
            logs = [made.tensors[names["log_z"]] for made in (base, chunk)]
            states, log_z = merge_entries(numbers[0], logs[0], numbers[1], logs[1], how=case.chunk_merge, chunks=(1, 1))
            np.testing.assert_array_equal(mapped[names["log_z"]], log_z)
            slack = {RowDtype.F32: 0.0, RowDtype.BF16: 2**-8, RowDtype.I8: 0.51 / 127}[case.dtype] * np.abs(states).max(
                -1, keepdims=True
            )
            assert (np.abs(numbers[2] - states) <= slack + 1e-7).all()
            counts = np.maximum(base.tensors[names["counts"]], chunk.tensors[names["counts"]])  # the same traces looked at both
            np.testing.assert_array_equal(mapped[names["counts"]], counts)
        before = await served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules", version=base.version)))
        assert await asyncio.to_thread(Path(before.path).read_bytes) == (base.folder / "dictionary.safetensors").read_bytes()
        assert served.metric("extends_total", outcome="ok") == 1


def test_the_file_is_what_writing_it_at_once_would_give(make: Make, tmp_path: Path) -> None:
    base, chunk = make(seed=1), make(seed=2)
    written, info = write_extended(tmp_path / TENSORS_FILE, (base.dictionary, base.tensors), (chunk.dictionary, chunk.tensors))
    tensors = map_tensors(tmp_path / TENSORS_FILE, written)
    dtypes = {name: about.dtype for name, about in written.tensors}
    write_tensors(tmp_path / "b", {name: (dtypes[name], np.array(tensors[name])) for name in dtypes})
    assert (tmp_path / TENSORS_FILE).read_bytes() == (tmp_path / "b").read_bytes()
    assert info.nbytes == (tmp_path / TENSORS_FILE).stat().st_size


def test_memory_does_not_grow_with_the_dictionary(make: Make, tmp_path: Path) -> None:
    case = DictionarySettings(heads_joined=1, grouping=Grouping.SHARED, dtype=RowDtype.F32, entries=32_768)
    base, chunk = make(seed=1, settings=case, layers=(0,)), make(seed=2, settings=case, layers=(0,))
    parts = [(made.dictionary, map_tensors(made.folder / "dictionary.safetensors", made.dictionary)) for made in (base, chunk)]
    tracemalloc.start()
    write_extended(tmp_path / TENSORS_FILE, parts[0], parts[1])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 48 << 20


def test_other_traces_are_added_and_their_figures_weighed(make: Make, tmp_path: Path) -> None:
    base, chunk = make(seed=1, calibration="one"), make(seed=2, calibration="other")
    written, _ = write_extended(tmp_path / TENSORS_FILE, (base.dictionary, base.tensors), (chunk.dictionary, chunk.tensors))
    assert (written.calibration.traces, written.calibration.tokens) == (6, 120)
    assert written.calibration.digest not in (base.dictionary.calibration.digest, chunk.dictionary.calibration.digest)
    found = map_tensors(tmp_path / TENSORS_FILE, written)
    np.testing.assert_array_equal(found["layers.0.counts"], base.tensors["layers.0.counts"] + chunk.tensors["layers.0.counts"])
    middle = (base.tensors["layers.0.cosine_quantiles"] + chunk.tensors["layers.0.cosine_quantiles"]) / 2
    np.testing.assert_allclose(found["layers.0.cosine_quantiles"], middle, atol=1e-6)


async def test_what_was_not_made_for_the_same_keys_is_refused_with_the_field(serve: Serve, make: Make, fails: Fails) -> None:
    case, model = CASES[0], DictionaryModel("cd" * 32, "cd" * 32, "cd" * 32, 4, 6, 2, 8)
    other = DictionarySettings(heads_joined=1, grouping=Grouping.SHARED, dtype=RowDtype.F32, entries=16, seed=9)
    base = make(seed=1, settings=case)
    async with serve() as served:
        await served.publish(base.messages(promote=True))
        for name, options, field in (
            ("keys", {"settings": case, "keys_seed": 8}, "tensors.layers.0.keys"),
            ("settings", {"settings": other}, "settings.seed"),
            ("layers", {"settings": case, "layers": (0,)}, "layers"),
            ("model", {"settings": case, "model": model}, "model.digest"),
        ):
            await served.publish(make(seed=2, name=name, **options).messages(promote=True))
            call = served.stub.Extend(pb.ExtendRequest(ref=pb.DictionaryRef(name="rules"), chunk=pb.DictionaryRef(name=name)))
            code, _, details = await fails(call)
            assert (code, details["treadle-field"]) == (grpc.StatusCode.FAILED_PRECONDITION, field)


async def test_a_chunk_is_added_where_it_was_read_and_nowhere_else(serve: Serve, make: Make, fails: Fails) -> None:
    base = make(seed=1)
    second, third = (
        make(seed=seed, name="chunk", prefix_text=f"chunk {seed}", tokens=11, first=first) for seed, first in ((2, 40), (3, 51))
    )
    whole = make(seed=4, name="whole", prefix_text="whole", tokens=11)  # read as what a prompt begins with
    async with serve() as served:
        for made in (base, second, third, whole):
            await served.publish(made.messages())

        def extend(one: pb.DictionaryRef, other: pb.DictionaryRef) -> Any:
            return served.stub.Extend(pb.ExtendRequest(ref=one, chunk=other))

        for chunk, found in ((third, "51"), (whole, "0")):
            code, text, details = await fails(extend(base.ref, chunk.ref))
            assert (code, details["treadle-field"]) == (grpc.StatusCode.FAILED_PRECONDITION, "prefix.first")
            assert "'40, the tokens of rules: " in text
            assert text.endswith(f"got {found}")
        longer = (await extend(base.ref, second.ref)).dictionary.ref
        again = make(seed=5, name="chunk", prefix_text="chunk 5", tokens=11, first=40)  # at whose positions the second stands
        await served.publish(again.messages())
        code, text, details = await fails(extend(longer, again.ref))
        assert (code, details["treadle-field"]) == (grpc.StatusCode.FAILED_PRECONDITION, "prefix.first")
        longest = (await extend(longer, third.ref)).dictionary
        assert json.loads(longest.manifest_json)["prefix"]["chunks"] == [40, 11, 11]
        assert "first" not in json.loads(longest.manifest_json)["prefix"]
        code, text, _ = await fails(extend(second.ref, third.ref))
        assert (code, "further chunk alone" in text) == (INVALID, True), text


async def test_a_further_chunk_alone_is_never_what_a_name_means(serve: Serve, make: Make, fails: Fails) -> None:
    base, chunk = make(seed=1), make(seed=2, prefix_text="second", tokens=11, first=40)
    async with serve() as served:
        await served.publish(base.messages(promote=True))
        promote = pb.PromoteRequest(ref=chunk.ref)
        code, text, _ = await fails(served.publish(chunk.messages(promote=True)))
        assert (code, "read behind 40 tokens: it is no prefix" in text) == (INVALID, True), text
        assert (await fails(served.stub.Promote(promote)))[0] == grpc.StatusCode.NOT_FOUND  # nothing of it was taken in
        await served.publish(chunk.messages())
        code, text, _ = await fails(served.stub.Promote(promote))
        assert (code, "read behind 40 tokens: it is no prefix" in text) == (INVALID, True), text
        now = (await served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules")))).dictionary.ref
        assert now.version == base.version
        with pytest.raises(InvalidArgument, match="it is no prefix"):
            await asyncio.to_thread(served.fabric.asm.publish, chunk.folder)


async def test_what_has_matched_keys_is_not_extended(serve: Serve, make: Make, fails: Fails) -> None:
    case = DictionarySettings(entries=16, matched_keys=4)
    async with serve() as served:
        await served.publish(make(seed=1, settings=case).messages(promote=True))
        await served.publish(make(seed=2, settings=case, name="chunk", prefix_text="chunk").messages(promote=True))
        call = served.stub.Extend(pb.ExtendRequest(ref=pb.DictionaryRef(name="rules"), chunk=pb.DictionaryRef(name="chunk")))
        code, text, _ = await fails(call)
        assert (code, "made with matched keys" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text


async def test_a_chunk_is_not_added_twice(serve: Serve, make: Make, fails: Fails) -> None:
    base, chunk = make(seed=1), make(seed=2, name="chunk", prefix_text="second", tokens=11, first=40)
    third = make(seed=3, name="third", prefix_text="third")
    async with serve() as served:
        for made in (base, chunk, third):
            await served.publish(made.messages(promote=made is not chunk))

        def extend(name: str, by: str, *, promote: bool = False) -> Any:
            named = {"chunk": chunk.ref}
            refs = {"ref": named.get(name, pb.DictionaryRef(name=name)), "chunk": named.get(by, pb.DictionaryRef(name=by))}
            return served.stub.Extend(pb.ExtendRequest(**refs, promote=promote))

        first = await extend("rules", "chunk", promote=True)
        await extend("third", "chunk", promote=True)
        for name, by, promote in (
            ("rules", "chunk", True),  # the same command again
            ("chunk", "chunk", False),
            ("rules", "third", False),  # in which the chunk is, too
        ):
            code, text, _ = await fails(extend(name, by, promote=promote))
            assert (code, "already" in text, chunk.dictionary.prefix.digest in text) == (INVALID, True, True), text
        now = (await served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules")))).dictionary.ref.version
        assert now == first.dictionary.ref.version


async def test_what_is_deleted_before_it_is_read_is_not_found(
    serve: Serve, make: Make, fails: Fails, eventually: Callable[[Callable[[], bool], str], Awaitable[None]]
) -> None:
    base, chunk = make(seed=1), make(seed=2, name="chunk", prefix_text="second", first=40)
    ref = pb.DictionaryRef(name="rules", version=base.version)
    async with serve() as served:
        for made in (base, chunk):
            await served.publish(made.messages(promote=made is base))
        compute = served.parts.server._publishing._compute
        async with compute._long:  # a publish is being checked: there are two threads, one for long work
            extending = asyncio.ensure_future(fails(served.stub.Extend(pb.ExtendRequest(ref=ref, chunk=chunk.ref))))
            await eventually(lambda: any(served.parts.folder.path.glob(".publishing-*")), "it waits for a thread")
            await served.stub.Delete(pb.DeleteRequest(ref=ref))
        code, text, _ = await extending
        assert (code, base.version in text) == (grpc.StatusCode.NOT_FOUND, True), text


async def test_what_is_extended_stays_while_the_chunk_is_brought(serve: Serve, make: Make, monkeypatch: Any) -> None:
    base, chunk = make(seed=1), make(seed=2, name="chunk", prefix_text="second", first=40)
    async with serve(versions_max=3) as served:
        for made in (base, chunk):
            await served.publish(made.messages())
        bringing = served.parts.bringing
        bring = bringing.bring

        async def full(name: str, version: str) -> Any:
            if name == "chunk":  # what comes meanwhile needs the room of one that nobody uses
                for seed in range(3, 6):
                    await served.publish(make(seed=seed, name="other").messages())
            return await bring(name, version)

        with served.parts.store.catalogue.get(("chunk", chunk.version)).in_use():  # type: ignore[union-attr]  # it is there
            monkeypatch.setattr(bringing, "bring", full)
            one, other = (pb.DictionaryRef(name=made.name, version=made.version) for made in (base, chunk))
            await served.stub.Extend(pb.ExtendRequest(ref=one, chunk=other))


async def test_extending_ends_with_its_time_and_leaves_nothing(serve: Serve, make: Make, fails: Fails) -> None:
    base, chunk = make(seed=1), make(seed=2, name="chunk", prefix_text="second", first=40)
    async with serve() as served:
        for made in (base, chunk):
            await served.publish(made.messages(promote=made is base))
        served.parts.server._publishing._seconds_max = 1e-6
        extend = pb.ExtendRequest(ref=pb.DictionaryRef(name="rules"), chunk=chunk.ref)
        code, text, _ = await fails(served.stub.Extend(extend))
        assert (code, "publish_seconds_max" in text) == (grpc.StatusCode.DEADLINE_EXCEEDED, True), text
        assert len((await served.stub.List(pb.ListRequest())).dictionaries) == 2
        assert not any(served.parts.folder.path.glob(".publishing-*"))


async def test_who_leaves_waits_for_one_block_and_not_for_the_whole(serve: Serve, make: Make, monkeypatch: Any) -> None:
    base, chunk = make(seed=1), make(seed=2, name="chunk", prefix_text="second", first=40)
    begun, go_on, blocks = threading.Event(), threading.Event(), list[int]()

    def merge(*arguments: Any, **options: Any) -> Any:
        blocks.append(len(blocks))
        begun.set()
        go_on.wait(20)
        return merge_entries(*arguments, **options)

    monkeypatch.setattr("asm_store.domain.extending.merge_entries", merge)
    async with serve() as served:
        for made in (base, chunk):
            await served.publish(made.messages(promote=made is base))
        extending = served.parts.server._extending
        work = asyncio.create_task(
            extending.extend(("rules", ""), ("chunk", chunk.version), Caller("default", admin=True), promote=False)
        )
        assert await asyncio.to_thread(begun.wait, 20)
        work.cancel()
        await asyncio.sleep(0.05)  # it has heard of it, and waits for its thread
        assert not work.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert len(blocks) == 1
        assert not any(served.parts.folder.path.glob(".publishing-*"))


async def test_a_name_that_means_another_version_is_not_flipped_by_extending(serve: Serve, make: Make, fails: Fails) -> None:
    one, two = make(seed=1), make(seed=2)
    async with serve() as served:
        await served.publish(one.messages())
        await served.publish(two.messages(promote=True))
        ref = pb.DictionaryRef(name="rules", version=one.version)
        code, text, _ = await fails(served.stub.Extend(pb.ExtendRequest(ref=ref, chunk=ref, promote=True)))
        assert (code, two.version in text, one.version in text) == (grpc.StatusCode.ABORTED, True, True)
        assert len((await served.stub.List(pb.ListRequest())).dictionaries) == 2
