"""Which long prefixes a request may choose, which version it keeps, and what becomes of it where the prefix cannot be had."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from inference_worker.adapters.prefix_kv_file import map_prefix_kv
from inference_worker.adapters.prefix_metrics import PrefixMetrics
from inference_worker.domain.errors import PrefixMisfit
from inference_worker.domain.lease import Lease
from inference_worker.domain.memory_status import NoCatalogue
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.prefix_catalogue import NoPrefixes, PrefixCatalogue
from inference_worker.domain.prefix_opening import PrefixOpener
from inference_worker.domain.request import Request
from inference_worker.domain.request_leases import LeaseDesk
from inference_worker.domain.resident_versions import Choice
from treadle.client.asm import map_folder
from treadle.contract.deadline import Deadline
from treadle.contract.dictionary import tensor_name
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE, read_manifest, tensor_info, tensor_offsets, write_folder
from treadle.contract.errors import DataLoss, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from treadle.contract.lookup_settings import LookupSettings
from treadle.contract.policy import Late, WaitPolicy
from treadle.nn.model import CausalLM
from treadle.nn.model_identity import dictionary_model

KEPT = 6  # matched keys
Make = Callable[..., PrefixCatalogue]
MakePrefix = Callable[..., Path]
Soon = Callable[[Callable[[], bool]], None]
Prompt = Callable[..., tuple[int, ...]]


class Counts:
    """An OpeningObserver."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.refusals: list[str] = []

    def opened(self, outcome: str, seconds: float) -> None:
        self.outcomes.append(outcome)

    def choice_refused(self, reason: str) -> None:
        self.refusals.append(reason)


@pytest.fixture
def made(make_prefix: MakePrefix, prompt: Prompt) -> Callable[..., Path]:
    """Folders of small dictionaries that differ by `seed`."""

    def make(seed: int = 0, **settings: Any) -> Path:
        return make_prefix(prompt(30, seed=seed), [prompt(8, seed=seed + 1)], **settings)

    return make


def opened(catalogue: PrefixCatalogue, name: str = "rules", version: str = "") -> Lease[OpenPrefix]:
    return catalogue.take(Choice(name, version)).result(30)


def version_of(lease: Lease[OpenPrefix]) -> str:
    assert lease.memory is not None
    return lease.memory.version


def test_a_version_is_mapped_at_first_use_and_told_of(fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]) -> None:
    kept, counts = fake_store.put(made()), Counts()
    catalogue = prefix_catalogues(observer=counts)
    (status,) = catalogue.prefixes()
    assert (status.name, status.version, status.tokens, status.open, status.mapped_bytes) == ("rules", kept.version, 30, False, 0)
    lease = opened(catalogue)
    assert catalogue.take(Choice("rules", kept.version[:8])).result(0).memory is lease.memory
    (status,) = catalogue.prefixes()
    assert (status.open, status.requests, status.refusal) == (True, 2, "")
    assert status.mapped_bytes == catalogue.mapped_bytes > kept.model.nbytes  # the exact KV too
    assert (counts.outcomes, fake_store.opened) == (["ok"], [kept.version])


def test_a_request_keeps_its_version_and_the_next_gets_the_new_one(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path], soon: Soon
) -> None:
    first = fake_store.put(made())
    catalogue = prefix_catalogues()
    old = opened(catalogue)
    second = fake_store.put(made(5))
    catalogue.update(fake_store.resident())
    soon(lambda: second.version in fake_store.opened)  # ahead, for the first request after the change
    new = opened(catalogue)
    assert (version_of(old), version_of(new)) == (first.version, second.version)
    assert fake_store.closed == []
    assert opened(catalogue, version=first.version[:8]).memory is old.memory  # who names it still gets it
    assert catalogue.prefixes()[0].requests == 3


def test_a_swap_that_is_quicker_than_an_opening_is_followed(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]
) -> None:
    first = fake_store.put(made())
    catalogue, real, tries = prefix_catalogues(), fake_store.open, []
    second = fake_store.put(made(5))  # the catalogue has not heard of it

    def swapped(name: str, version: str, expected: Any) -> Any:
        tries.append(version)
        if version == first.version:
            raise NotFound("it was deleted")
        return real(name, version, expected)

    fake_store.open = swapped
    assert version_of(opened(catalogue)) == second.version
    assert tries == [first.version, second.version]
    with pytest.raises(NotFound, match="in the store no more"):
        opened(catalogue, version=first.version)  # who names a version means no other
    fake_store.kept = [replace(first, current=True)]
    catalogue.update(fake_store.resident())
    tries.clear()
    with pytest.raises(NotFound, match="in the store no more"):
        opened(catalogue)  # the listing goes on to name what cannot be opened: it ends
    assert tries == [first.version] * 2


def test_a_version_that_nobody_uses_any_more_is_closed(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path], soon: Soon
) -> None:
    first = fake_store.put(made())
    catalogue = prefix_catalogues()
    lease = opened(catalogue)
    fake_store.put(made(5))
    catalogue.update(fake_store.resident())
    lease.release()
    soon(lambda: fake_store.closed == [first.version])


def test_what_keeps_the_exact_kv_from_being_read_now_condemns_no_version(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_store.put(made())
    catalogue = prefix_catalogues()

    def fail(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", fail)
        with pytest.raises(Unavailable, match="Too many open files; try again"):
            opened(catalogue)
    assert catalogue.prefixes()[0].refusal == ""
    assert opened(catalogue).memory is not None


def test_a_choice_before_the_store_has_answered_is_counted_in_the_stores_words(
    fake_store: Any, tiny: CausalLM, tiny_folder: Path
) -> None:
    opener = PrefixOpener(lambda: dictionary_model(tiny_folder, tiny.config), tiny.config.positions_max, map_prefix_kv)
    counts = Counts()
    catalogue = PrefixCatalogue(fake_store, opener, open_max=1, observer=counts)
    with pytest.raises(Unavailable, match=r"asm store .* has not answered yet"):
        catalogue.take(Choice("rules"))
    assert counts.refusals == ["no_store"]
    catalogue.close()


def test_what_an_open_prefix_copies_is_counted_beside_what_it_maps(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path], tiny: CausalLM, tmp_path: Path
) -> None:
    fake_store.put(_with_matched_keys(made(), tmp_path, tiny))
    catalogue, registry = prefix_catalogues(), CollectorRegistry()
    PrefixMetrics(registry).watch(catalogue)
    assert registry.get_sample_value("treadle_worker_prefix_copied_bytes") == 0
    opened(catalogue)
    config = tiny.config
    copied = config.layers * config.kv_heads * KEPT * (2 * config.head_dim + 1) * 4  # keys, values and biases
    assert registry.get_sample_value("treadle_worker_prefix_copied_bytes") == copied


def test_where_another_process_runs_the_model_nothing_of_a_prefix_is_copied_here(
    fake_store: Any, made: Callable[..., Path], tiny: CausalLM, tiny_folder: Path, tmp_path: Path
) -> None:
    class Host:
        def __init__(self) -> None:
            self.told: list[str] = []

        def open(self, mapped: Any) -> None:
            self.told.append(f"open {mapped.version}")

        def close(self, mapped: Any) -> None:
            self.told.append(f"close {mapped.version}")

    kept, mine, host = (
        fake_store.put(_with_matched_keys(made(), tmp_path, tiny)),
        dictionary_model(tiny_folder, tiny.config),
        Host(),
    )
    prefix = PrefixOpener(lambda: mine, tiny.config.positions_max, map_prefix_kv, host).open(fake_store, kept.model, kept.version)
    assert (prefix.memory, prefix.copied_bytes, prefix.positions_before) == (None, 0, kept.model.prefix.tokens)
    prefix.close()
    assert host.told == [f"open {kept.version}", f"close {kept.version}"]


def _with_matched_keys(folder: Path, out: Path, tiny: CausalLM) -> Path:
    """The dictionary of a folder, with matched keys of noise."""
    found, chance, config = map_folder(folder), np.random.default_rng(1), tiny.config
    tensors = dict(found.tensors)
    for layer in found.dictionary.layers:
        for part, shape in (("keys", (config.head_dim,)), ("values", (config.head_dim,)), ("biases", ())):
            name = tensor_name(layer, f"matched_{part}")
            tensors[name] = chance.standard_normal((config.kv_heads, KEPT, *shape), dtype=np.float32)
    infos = tuple((name, tensor_info(rows, "I32" if rows.dtype == np.int32 else "F32")) for name, rows in sorted(tensors.items()))
    settings = replace(found.dictionary.settings, matched_keys=KEPT)
    write_folder(out, replace(found.dictionary, settings=settings, tensors=infos, prefix_kv=None), tensors)
    return out


def test_prefixes_are_looked_up_as_the_opener_was_told(
    fake_store: Any, tiny: CausalLM, tiny_folder: Path, made: Callable[..., Path]
) -> None:
    kept, mine = fake_store.put(made()), dictionary_model(tiny_folder, tiny.config)
    opener = PrefixOpener(lambda: mine, tiny.config.positions_max, map_prefix_kv, lookup=LookupSettings(7, 100))
    prefix = opener.open(fake_store, kept.model, kept.version)
    assert prefix.memory is not None
    for layer in prefix.memory._layers.values():
        entries = layer.entries  # type: ignore[attr-defined]
        assert (entries.lists_probed, entries.thresholds.tolist()) == (7, [1.0])
    prefix.close()


def test_a_dictionary_of_another_model_is_refused_by_its_narrowest_field(
    fake_store: Any, tiny: CausalLM, tiny_folder: Path, made: Callable[..., Path]
) -> None:
    kept, mine = fake_store.put(made()), dictionary_model(tiny_folder, tiny.config)
    for field in ("rope", "tokenizer", "digest"):
        changed: dict[str, Any] = {"digest": "1" * 64, field: "0" * 64}
        counts = Counts()
        opener = PrefixOpener(partial(replace, mine, **changed), tiny.config.positions_max, map_prefix_kv)
        catalogue = PrefixCatalogue(fake_store, opener, open_max=2, observer=counts)
        catalogue.update(fake_store.resident())
        with pytest.raises(
            PrefixMisfit, match=rf"^prefix 'rules' was made with another language model: .*'model.{field}'"
        ) as raised:
            catalogue.take(Choice("rules"))
        assert (raised.value.field, counts.refusals, fake_store.opened) == (f"model.{field}", ["misfit"], [])
        assert f"model.{field}" in catalogue.prefixes()[0].refusal
        catalogue.close()
    tight = PrefixOpener(lambda: mine, 31, map_prefix_kv)
    with pytest.raises(PrefixMisfit, match=r"prefix\.tokens"):
        tight.check(kept.model)
    opener = PrefixOpener(lambda: mine, tiny.config.positions_max, map_prefix_kv)
    opener.check(kept.model)
    with pytest.raises(PrefixMisfit, match=r"is none to answer behind: .*'prefix\.first'.*further chunk.*got 40"):
        opener.check(replace(kept.model, prefix=replace(kept.model.prefix, first=40)))


def test_what_is_not_there_is_named_with_what_is(fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]) -> None:
    kept = fake_store.put(made())
    catalogue = prefix_catalogues()
    with pytest.raises(NotFound, match=r"^prefix.name: there is no prefix 'guide' here; there is 'rules'"):
        opened(catalogue, "guide")
    with pytest.raises(NotFound, match=r"^prefix.version: 'rules' has no version 00000000…"):
        opened(catalogue, version="00000000")
    with pytest.raises(InvalidArgument, match=r"^prefix.version: 8 to 64 hexadecimal digits"):
        opened(catalogue, version="xyz")
    fake_store.kept = [replace(each, current=False) for each in fake_store.kept]
    catalogue.update(fake_store.resident())
    with pytest.raises(NotFound, match=r"^prefix.version: 'rules' points to no version now; promote one"):
        opened(catalogue)
    assert "points to no version now" in catalogue.prefixes()[0].refusal
    assert opened(catalogue, version=kept.version).memory is not None
    with pytest.raises(NotFound, match="without an asm_store"):
        NoPrefixes().take(Choice("rules"))


def test_an_exact_kv_that_is_not_the_manifests_is_never_attended_to(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]
) -> None:
    folder = made()
    kept, path = fake_store.put(folder), folder / PREFIX_KV_FILE
    good = bytearray(path.read_bytes())
    good[-1] ^= 1
    path.write_bytes(good)
    catalogue = prefix_catalogues()
    with pytest.raises(DataLoss, match=rf"^prefix 'rules', version {kept.version}, is damaged: prefix KV: the sha256"):
        opened(catalogue)
    assert fake_store.closed == [kept.version]
    assert "is damaged" in catalogue.prefixes()[0].refusal


def test_a_dictionary_whose_tensors_no_lookup_can_read_is_not_opened(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]
) -> None:
    folder = made()
    kept, path = fake_store.put(folder), folder / TENSORS_FILE
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :])
    catalogue = prefix_catalogues()
    with pytest.raises(DataLoss, match=r"is damaged: tensor layers\.\d\.\w+ does not begin at a multiple"):
        opened(catalogue)
    assert fake_store.closed == [kept.version]


@pytest.mark.parametrize(
    ("part", "number"), [("states", np.nan), ("states", np.inf), ("keys", -np.inf), ("log_z", np.nan), ("log_z", np.inf)]
)
def test_a_dictionary_whose_last_layer_holds_no_numbers_is_not_opened(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path], part: str, number: float
) -> None:
    folder = made()
    kept, path = fake_store.put(folder), folder / TENSORS_FILE
    dictionary = read_manifest(folder)
    name = tensor_name(dictionary.layers[-1], part)
    end = tensor_offsets(path, dictionary)[name] + dict(dictionary.tensors)[name].nbytes
    data = bytearray(path.read_bytes())
    data[end - 4 : end] = struct.pack("<f", number)
    path.write_bytes(data)
    catalogue = prefix_catalogues()
    with pytest.raises(DataLoss, match=rf"is damaged: tensor {name}: NaN or infinity; publish it again"):
        opened(catalogue)
    assert fake_store.closed == [kept.version]
    assert name in catalogue.prefixes()[0].refusal


def test_a_log_z_of_minus_infinity_is_an_entry_without_samples(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]
) -> None:
    folder = made()
    kept, path = fake_store.put(folder), folder / TENSORS_FILE
    dictionary = read_manifest(folder)
    at = tensor_offsets(path, dictionary)[tensor_name(dictionary.layers[-1], "log_z")]
    data = bytearray(path.read_bytes())
    data[at : at + 4] = struct.pack("<f", -np.inf)
    path.write_bytes(data)
    assert version_of(opened(prefix_catalogues())) == kept.version


def test_an_exact_kv_that_left_with_its_version_is_no_damage(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]
) -> None:
    folder = made()
    kept = fake_store.put(folder)
    real = fake_store.open

    def leaves(*asked: Any) -> Any:
        mapped = real(*asked)
        (folder / PREFIX_KV_FILE).rename(folder / "gone")
        return mapped

    fake_store.open = leaves
    catalogue = prefix_catalogues()
    with pytest.raises(NotFound, match=rf"^prefix.version: 'rules', version {kept.version}, is in the store no more: prefix KV"):
        opened(catalogue, version=kept.version)
    assert catalogue.prefixes()[0].refusal == ""
    (folder / "gone").rename(folder / PREFIX_KV_FILE)
    fake_store.open = real
    assert opened(catalogue, version=kept.version).memory is not None


def test_a_store_that_has_never_answered_says_so(prefix_catalogues: Make) -> None:
    catalogue = prefix_catalogues(heard=False)
    catalogue.lost("it is away")
    (status,) = catalogue.prefixes()
    assert (status.name, status.refusal) == ("", "the asm store at fake:2 has not answered yet: it is away")


async def test_without_its_store_a_request_goes_on_without_the_prefix_or_fails_as_its_policy_says(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]
) -> None:
    kept = fake_store.put(made())
    catalogue = prefix_catalogues()
    fake_store.failure = Unavailable("the store is away")
    desk = LeaseDesk(NoCatalogue(), catalogue, 10.0)
    for named in (
        "",
        kept.version[:8],
        kept.version,
    ):  # the report says what was asked for: which version it would have been is not known
        asked, leases = await desk.take(Request((1,), policy=WaitPolicy(0.0, Late.MASK)), None, Choice("rules", named))
        (missing,) = asked.missing
        assert (missing.kind, missing.name, missing.version, missing.missing_because) == ("prefix", "rules", named, "unavailable")
        assert (missing.prefix_tokens, leases.prefix.memory) == (0, None)
    with pytest.raises(Unavailable, match="the store is away"):
        await desk.take(Request((1,), policy=WaitPolicy(0.0, Late.FAIL)), None, Choice("rules"))
    with pytest.raises(NotFound):  # no policy makes up for a name that is wrong
        await desk.take(Request((1,), policy=WaitPolicy(0.0, Late.MASK)), None, Choice("guide"))


async def test_a_store_that_hangs_is_as_good_as_away(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.domain.request_leases.WELL_SECONDS", 0.1)
    fake_store.put(made())
    catalogue, masks, fails = prefix_catalogues(), WaitPolicy(0.05, Late.MASK), WaitPolicy(0.05, Late.FAIL)
    desk, real, end = LeaseDesk(NoCatalogue(), catalogue, 10.0), fake_store.open, threading.Event()
    fake_store.failure = DeadlineExceeded("the call took longer than 5 s")
    asked, _ = await desk.take(Request((1,), policy=masks), None, Choice("rules"))
    assert asked.missing[0].missing_because == "unavailable"

    def hangs(*asked: Any) -> Any:
        end.wait(10)
        return real(*asked)

    fake_store.open, fake_store.failure = hangs, None
    async with asyncio.timeout(5):  # not as long as an opening may take
        asked, leases = await desk.take(Request((1,), policy=masks), None, Choice("rules"))
        with pytest.raises(Unavailable, match=r"still being opened after 0\.1 s"):
            await desk.take(Request((1,), policy=fails), None, Choice("rules"))
        with pytest.raises(DeadlineExceeded):
            await desk.take(Request((1,), policy=WaitPolicy(5.0), deadline=Deadline.after(0.05)), None, Choice("rules"))
    assert (asked.missing[0].missing_because, leases.prefix.memory) == ("unavailable", None)
    end.set()
    opened(catalogue).release()
    assert catalogue.prefixes()[0].requests == 0


async def test_a_store_that_comes_back_within_the_wait_is_waited_for(
    fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]
) -> None:
    fake_store.put(made())
    catalogue, opening, tries = prefix_catalogues(), fake_store.open, []

    def fails_once(*asked: Any) -> Any:
        tries.append(asked)
        if len(tries) == 1:
            raise Unavailable("the store restarts")
        return opening(*asked)

    fake_store.open = fails_once
    patient = Request((1,), policy=WaitPolicy(20.0))
    asked, leases = await LeaseDesk(NoCatalogue(), catalogue, 30.0).take(patient, None, Choice("rules"))
    assert (asked.missing, leases.prefix.memory is not None, len(tries)) == ((), True, 2)
    leases.release()
    assert catalogue.prefixes()[0].requests == 0


async def test_a_version_that_is_mapped_needs_no_store(fake_store: Any, prefix_catalogues: Make, made: Callable[..., Path]) -> None:
    fake_store.put(made())
    catalogue = prefix_catalogues()
    opened(catalogue).release()
    fake_store.failure = fake_store.silent = Unavailable("the store is away")
    catalogue.lost("it is away")
    _, leases = await LeaseDesk(NoCatalogue(), catalogue, 10.0).take(Request((1,)), None, Choice("rules"))
    assert leases.prefix.memory is not None
