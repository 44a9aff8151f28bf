"""What a store does not take in: each refused with the right code and with what is wrong named, and nothing left behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np
import pytest

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.contract.dictionary import DictionarySettings, RowDtype
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE, write_tensors

if TYPE_CHECKING:
    from tests.conftest import Make, Serve, Served, Tensors

Fails = Callable[[Any], Awaitable[tuple[grpc.StatusCode, str, dict[str, str]]]]
Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]
INVALID, LOSS = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS
BF16 = DictionarySettings(heads_joined=1, dtype=RowDtype.BF16, entries=16, lists=2, ridge_ppm=5)
F32 = DictionarySettings(heads_joined=1, dtype=RowDtype.F32, entries=16)
MATCHED = DictionarySettings(heads_joined=1, dtype=RowDtype.I8, entries=16, matched_keys=4)


def leftovers(served: Served) -> list[str]:
    """What lies in the data folder beside its own files."""
    return sorted(path.name for path in served.parts.folder.path.iterdir() if path.name not in (".lock", ".pointers", ".replica"))


async def refused(served: Served, fails: Fails, messages: list[pb.PublishRequest]) -> tuple[grpc.StatusCode, str]:
    code, text, _ = await fails(served.publish(messages))
    assert leftovers(served) == []
    assert (await served.stub.Status(pb.StatusRequest())).versions == 0
    return code, text


def put(name: str, value: Any, at: Any = (0, 1)) -> Callable[[Tensors], None]:
    """A change of one number."""

    def change(tensors: Tensors) -> None:
        tensors[name][at] = value

    return change


def longer(tensors: Tensors) -> None:
    tensors["layers.2.keys"][0, 3] *= 2


@pytest.mark.parametrize(
    ("settings", "change", "tensor", "words"),
    [
        (F32, put("layers.0.keys", np.nan), "layers.0.keys", "NaN"),
        (F32, put("layers.2.states", np.inf), "layers.2.states", "infinity"),
        (F32, put("layers.2.states", -1e38), "layers.2.states", "at most 1e+07"),
        (BF16, put("layers.0.states", 0x7E96), "layers.0.states", "at most 1e+07"),
        (F32, put("layers.2.states", np.nan, (-1, -1, -1, -1)), "layers.2.states", "NaN"),  # the last number of the last layer
        (F32, put("layers.2.keys", np.inf, (-1, -1, -1)), "layers.2.keys", "infinity"),
        (None, put("layers.2.state_scales", np.nan, (-1, -1)), "layers.2.state_scales", "NaN"),
        (BF16, put("layers.0.states", 0x7FC0), "layers.0.states", "NaN"),
        (BF16, put("layers.2.keys", 0xFF80), "layers.2.keys", "infinity"),
        (None, put("layers.0.key_scales", np.inf), "layers.0.key_scales", "infinity"),
        (None, put("layers.0.state_scales", -1), "layers.0.state_scales", "below 0"),
        (F32, put("layers.0.log_z", np.nan), "layers.0.log_z", "2 are not"),
        (F32, put("layers.0.log_z", np.inf), "layers.0.log_z", "finite where counts > 0"),
        (F32, put("layers.0.log_z", -np.inf), "layers.0.log_z", "finite where counts > 0"),
        (F32, put("layers.0.log_z", 1.5, (0, 0)), "layers.0.log_z", "-inf where counts == 0"),
        (F32, put("layers.2.counts", -1), "layers.2.counts", "below 0"),
        (F32, put("layers.0.cosine_quantiles", 2.0, (0, 100)), "layers.0.cosine_quantiles", "outside"),
        (F32, put("layers.0.cosine_quantiles", -0.5, (0, 50)), "layers.0.cosine_quantiles", "fall"),
        (F32, put("layers.0.cosine_quantiles", np.nan, (0, 50)), "layers.0.cosine_quantiles", "NaN"),
        (BF16, put("layers.0.list_keys", np.nan), "layers.0.list_keys", "NaN"),
        (BF16, put("layers.2.list_starts", 1, (0, 0)), "layers.2.list_starts", "from 0 to 16"),
        (BF16, put("layers.2.list_starts", 15, (0, 2)), "layers.2.list_starts", "from 0 to 16"),
        (BF16, put("layers.2.list_starts", 99, (0, 1)), "layers.2.list_starts", "fall"),
        (BF16, put("layers.0.whitening", np.nan), "layers.0.whitening", "NaN"),
        (F32, longer, "layers.2.keys", "entry 3"),
        (MATCHED, put("layers.0.matched_keys", 0x7FC0), "layers.0.matched_keys", "NaN"),
        (MATCHED, put("layers.2.matched_values", 0x7E96), "layers.2.matched_values", "at most 1e+07"),
        (MATCHED, put("layers.2.matched_biases", 1e9), "layers.2.matched_biases", "at most 10000"),
        (MATCHED, put("layers.2.matched_biases", -np.inf), "layers.2.matched_biases", "infinity"),
    ],
)
async def test_numbers_that_no_lookup_could_use_name_their_tensor(
    serve: Serve, make: Make, fails: Fails, settings: Any, change: Any, tensor: str, words: str
) -> None:
    made = make(settings=settings, change=change)
    async with serve() as served:
        code, text = await refused(served, fails, made.messages())
        assert (code, f"tensor {tensor}: " in text, words in text) == (INVALID, True, True), text


async def test_a_tensor_of_another_shape_or_place_than_the_manifest_says_is_named(serve: Serve, make: Make, fails: Fails) -> None:
    async with serve() as served:
        for tensor, entries in (("layers.2.log_z", 15), ("layers.0.counts", 0)):  # 0: it is left out
            made = make(settings=F32, seed=len(tensor))
            dtypes = {name: info.dtype for name, info in made.dictionary.tensors}
            kept = {name: (dtypes[name], rows) for name, rows in made.tensors.items() if name != tensor}
            if entries:
                kept[tensor] = (dtypes[tensor], np.ascontiguousarray(made.tensors[tensor][:, :entries]))
            write_tensors(made.folder / TENSORS_FILE, kept)
            code, text = await refused(served, fails, made.messages())
            assert (code, f"tensor {tensor} is" in text) == (INVALID, True), text
        made = make(settings=F32, seed=5)
        (made.folder / TENSORS_FILE).write_bytes(b"\xff" * 4096)
        assert (await refused(served, fails, made.messages()))[0] is INVALID


async def test_a_tensor_with_another_digest_than_the_manifest_says_is_named(serve: Serve, make: Make, fails: Fails) -> None:
    made = make(lying={"layers.2.states": "ab" * 32})
    async with serve() as served:
        code, text = await refused(served, fails, made.messages())
        assert (code, "tensor layers.2.states: its sha256" in text) == (LOSS, True), text


async def test_bytes_that_do_not_fit_their_checksums_are_lost(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve() as served:
        messages = made.messages()
        messages[1].piece.crc32c ^= 1
        code, text = await refused(served, fails, messages)
        assert (code, "crc32c of the bytes at 0" in text, TENSORS_FILE in text) == (LOSS, True, True)
        files = made.files()
        files[0].sha256 = "ab" * 32
        code, text = await refused(served, fails, made.messages(files=files))
        assert (code, f"{TENSORS_FILE}: its sha256" in text) == (LOSS, True)


async def test_a_stream_that_ends_early_or_goes_on_is_refused(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve() as served:
        whole = made.messages()
        assert len(whole) > 3
        for few in (whole[:1], whole[:2], whole[:-1]):
            code, text = await refused(served, fails, few)
            assert (code, "ended early" in text) == (LOSS, True)
        code, text = await refused(served, fails, [*whole[:2], whole[-1]])
        assert (code, "the end came at byte" in text) == (LOSS, True)
        assert (await refused(served, fails, []))[0] is LOSS
        for wrong, words in (
            ([*whole[:-1], whole[1], whole[-1]], "where the end was due"),
            (whole[1:], "begin"),
            ([whole[0], *whole], "began twice"),
            ([whole[0], whole[2]], "piece.offset_bytes"),
            ([whole[0], pb.PublishRequest()], "begin, piece or end"),
        ):
            code, text = await refused(served, fails, wrong)
            assert (code, words in text) == (INVALID, True), text


async def test_a_silent_publisher_is_not_waited_for(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve(publish_silence_seconds=0.2) as served:
        gone = asyncio.Event()

        async def stalling() -> Any:
            yield made.begin()
            await gone.wait()

        code, text, _ = await fails(served.stub.Publish(stalling()))
        gone.set()
        assert (code, "nothing came for" in text) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
        assert leftovers(served) == []


async def test_one_publish_too_many_is_refused_at_once(serve: Serve, make: Make, fails: Fails, eventually: Eventually) -> None:
    first, second = make(seed=1), make(seed=2)
    async with serve(publishes_max=1) as served:
        go_on, begun = asyncio.Event(), asyncio.Event()

        async def waiting() -> Any:
            yield first.begin()
            begun.set()
            await go_on.wait()
            for message in first.messages()[1:]:
                yield message

        call = asyncio.ensure_future(_answer(served.stub.Publish(waiting())))
        await begun.wait()
        await eventually(lambda: any(name.startswith(".publishing") for name in leftovers(served)), "it is being received")
        code, text, details = await fails(served.publish(second.messages()))
        assert (code, "publishes_max" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert float(details["treadle-retry-after-seconds"]) > 0
        go_on.set()
        assert not (await call).existed


async def _answer(call: Any) -> Any:
    return await call


async def test_an_announcement_is_refused_before_its_bytes_are_read(serve: Serve, make: Make, fails: Fails) -> None:
    made = make(prefix_kv=True)
    manifest, files = made.dictionary.to_manifest(), made.files()
    other = [pb.FileInfo(name=f.name, bytes=f.bytes, sha256=f.sha256) for f in files]
    other[1].sha256 = "ab" * 32
    large = [pb.FileInfo(name=f.name, bytes=f.bytes, sha256=f.sha256) for f in files]
    large[0].bytes = 1 << 30

    def changed(**fields: Any) -> bytes:
        return json.dumps(manifest | fields, sort_keys=True, separators=(",", ":")).encode()

    async with serve() as served:
        for fields, words in (
            ({"manifest_json": b"{"}, "not JSON"),
            ({"manifest_json": changed(schema="other/1")}, "schema"),
            ({"manifest_json": changed(layers=[0, 9])}, "layers"),
            ({"manifest_json": changed(settings=manifest["settings"] | {"log_base": "2"})}, "settings.log_base"),
            ({"manifest_json": changed(name="../up")}, "name"),
            ({"manifest_json": json.dumps(manifest).encode()}, "canonical"),
            ({"card_json": b"[1]"}, "card_json"),
            ({"card_json": b'{"a":' * 40 + b"1" + b"}" * 40}, "nested deeper than 32"),
            ({"card_json": b"{" + b" " * (300 << 10) + b"}"}, "card_json"),
            ({"files": files[:1]}, "files"),
            ({"files": files[::-1]}, "files"),
            ({"files": other}, PREFIX_KV_FILE),
            ({"files": large}, "at most"),
            ({"files": [pb.FileInfo(name="../x", bytes=1, sha256="ab" * 32)]}, "files"),
        ):
            code, text = await refused(served, fails, [made.begin(**fields)])
            assert (code, words in text) == (INVALID, True), text
        assert served.metric("publishes_total", outcome="refused") == 13  # the last one was no announcement at all


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"kv": ("F32", np.zeros((4, 2, 2, 39, 8), np.float32))}, "shape [4, 2, 2, 40, 8] expected"),
        ({"kv": ("F32", np.full((4, 2, 2, 40, 8), np.nan, np.float32))}, "NaN"),
        ({"kv": ("BF16", np.full((4, 2, 2, 40, 8), 0x7F80, np.uint16))}, "infinity"),
        ({"kv": ("F16", np.zeros((4, 2, 2, 40, 8), np.float16))}, "F32 or BF16"),
        ({"other": ("F32", np.zeros((4, 2, 2, 40, 8), np.float32))}, "one tensor 'kv'"),
    ],
)
async def test_an_exact_prefix_that_does_not_fit_is_refused(
    serve: Serve, make: Make, fails: Fails, tensors: Any, words: str
) -> None:
    made = make(prefix_kv=True)
    write_tensors(made.folder / PREFIX_KV_FILE, tensors)
    digest = hashlib.sha256((made.folder / PREFIX_KV_FILE).read_bytes()).hexdigest()
    object.__setattr__(made.dictionary, "prefix_kv", digest)
    async with serve() as served:
        code, text = await refused(served, fails, made.messages())
        assert (code, words in text, PREFIX_KV_FILE in text) == (INVALID, True, True), text


async def test_names_and_versions_that_are_none_are_refused(serve: Serve, make: Make, fails: Fails) -> None:
    first, second = make(seed=1), make(seed=2)
    async with serve() as served:
        await served.publish(first.messages(promote=True))
        await served.publish(second.messages())
        for name, version, code in (
            ("", "", INVALID), ("../x", "", INVALID), ("rules", "xyz", INVALID), ("rules", "abc", INVALID),
            ("unknown", "", grpc.StatusCode.NOT_FOUND), ("rules", "0" * 64, grpc.StatusCode.NOT_FOUND),
        ):  # fmt: skip
            ref = pb.DictionaryRef(name=name, version=version)
            for call in (
                served.stub.Open(pb.OpenRequest(ref=ref)), served.stub.Get(pb.GetRequest(ref=ref)),
                served.stub.Hold(pb.HoldRequest(ref=ref)), served.stub.Lookup(pb.LookupRequest(ref=ref, queries=b"")),
                served.stub.Pin(pb.PinRequest(ref=ref, ttl_seconds=1)), served.stub.Unpin(pb.UnpinRequest(ref=ref)),
                served.stub.Extend(pb.ExtendRequest(ref=ref, chunk=pb.DictionaryRef(name="rules"))),
            ):  # fmt: skip
                found, text, _ = await fails(call)
                assert found is code, (name, version, text)
        code, text, _ = await fails(served.stub.Promote(pb.PromoteRequest(ref=pb.DictionaryRef(name="rules"))))
        assert (code, "version" in text) == (INVALID, True)


async def test_tensors_that_cannot_be_mapped_where_they_lie_are_refused(serve: Serve, make: Make, fails: Fails) -> None:
    made = make(settings=F32)
    path = made.folder / TENSORS_FILE
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    async with serve() as served:
        code, text = await refused(served, fails, made.messages())
        assert (code, "a multiple of 4" in text) == (INVALID, True)


@pytest.mark.parametrize("wrong", [5, ["a"], None])
async def test_a_header_whose_shape_is_none_is_refused(serve: Serve, make: Make, fails: Fails, wrong: Any) -> None:
    made = make(settings=F32)
    path = made.folder / TENSORS_FILE
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["layers.0.keys"]["shape"] = wrong
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    async with serve() as served:
        code, said = await refused(served, fails, made.messages())
        assert (code, "header is damaged" in said) == (INVALID, True)
