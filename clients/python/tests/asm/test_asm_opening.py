"""The SDK opens a version: it holds the lock, and asks again while versions come and go."""

from __future__ import annotations

import fcntl
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from treadle.client import Fabric
from treadle.client.asm import AsmStore
from treadle.client.asm import mapped as mapping
from treadle.contract import DataLoss, DeadlineExceeded, FingerprintMismatch, NotFound, Unavailable
from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_file import TENSORS_FILE, read_manifest, tensor_offsets

if TYPE_CHECKING:
    from tests.asm.conftest import ScriptedStore


def test_a_mapped_version_is_held_until_it_is_closed_or_forgotten(asm: AsmStore, scripted: ScriptedStore) -> None:
    mapped = asm.open("rules", verify=True)
    assert scripted.held
    view = mapped.tensors["layers.0.keys"]
    kept = view.copy()
    mapped.close()
    mapped.close()
    assert not scripted.held
    assert (mapped.closed, dict(mapped.tensors)) == (True, {})
    scripted.opening = lambda number: (scripted.folder / TENSORS_FILE).unlink()
    with pytest.raises(NotFound, match=TENSORS_FILE):
        asm.open("rules")
    assert np.array_equal(view, kept)  # whoever kept a view reads on
    assert not scripted.held  # a mapping that could not be made does not keep the lock


def test_a_forgotten_mapping_lets_go(asm: AsmStore, scripted: ScriptedStore) -> None:
    mapped = asm.open("rules")
    assert scripted.held
    del mapped
    assert not scripted.held


def test_a_version_that_leaves_while_it_is_opened_is_asked_for_again(asm: AsmStore, scripted: ScriptedStore) -> None:
    def leave(number: int) -> None:
        if number == 1:
            scripted.lock_path.unlink()
        else:
            scripted.lock_path.touch()

    scripted.opening = leave
    with asm.open("rules") as mapped:
        assert (mapped.name, scripted.opens) == ("rules", 2)


def in_a_data_folder(scripted: ScriptedStore) -> None:
    """The folder at DATA/NAME/VERSION, as a store keeps it."""
    place = scripted.folder.parent / "data" / "rules" / "version"
    place.parent.mkdir(parents=True)
    scripted.folder.rename(place)
    scripted.folder, scripted.lock_path = place, place / "lock"


def test_a_version_whose_folder_is_renamed_away_is_asked_for_again(asm: AsmStore, scripted: ScriptedStore) -> None:
    in_a_data_folder(scripted)
    data = scripted.folder.parents[1]

    def leave(number: int) -> None:
        if number == 1:
            scripted.folder = (
                scripted.folder.parent.rename(data / "other") / "version"
            )  # its name's folder goes with the last version
            scripted.lock_path = scripted.folder / "lock"

    scripted.opening = leave
    with asm.open("rules") as mapped:
        assert (mapped.name, scripted.opens) == ("rules", 2)


@pytest.mark.parametrize("lost", [TENSORS_FILE, "lock"])
def test_a_version_that_leaves_after_it_was_locked_is_asked_for_again(
    lost: str, asm: AsmStore, scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_data_folder(scripted)
    kept, locks = scripted.folder.with_name("kept"), list[int]()

    def lock(path: Path, what: str) -> int:
        descriptor = real(path, what)
        locks.append(descriptor)
        if len(locks) == 1:  # a delete goes on although somebody holds the lock
            shutil.copytree(scripted.folder, kept)
            (scripted.folder / "lock").unlink()
            (scripted.folder / lost).unlink(missing_ok=True)
            scripted.folder, scripted.lock_path = kept, kept / "lock"
        return descriptor

    real = mapping._shared_lock
    monkeypatch.setattr(mapping, "_shared_lock", lock)
    with asm.open("rules") as opened:
        assert (opened.name, scripted.opens) == ("rules", 2)


def test_a_version_that_is_being_removed_is_not_found_once_patience_ends(asm: AsmStore, scripted: ScriptedStore) -> None:
    with scripted.lock_path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(NotFound, match="being removed"):
            asm.open("rules")
    assert scripted.opens > 1


def test_a_store_on_another_host_is_told_from_one_that_lost_the_version(asm: AsmStore, scripted: ScriptedStore) -> None:
    scripted.lock_path = Path("/nowhere/that/exists/lock")
    with pytest.raises(NotFound, match="map_folder"):
        asm.open("rules")
    assert scripted.opens == 1


def test_verify_names_the_tensor_whose_bytes_are_not_the_manifests(asm: AsmStore, scripted: ScriptedStore) -> None:
    dictionary: Dictionary = read_manifest(scripted.folder)
    offset = tensor_offsets(scripted.folder / TENSORS_FILE, dictionary)["layers.1.log_z"]
    data = bytearray((scripted.folder / TENSORS_FILE).read_bytes())
    data[offset] ^= 1
    (scripted.folder / TENSORS_FILE).write_bytes(data)
    with asm.open("rules") as mapped, pytest.raises(DataLoss, match=r"layers\.1\.log_z"):
        mapped.verify()
    with pytest.raises(DataLoss, match=r"layers\.1\.log_z"):
        asm.open("rules", verify=True)
    assert not scripted.held


def test_a_store_that_copies_before_it_answers_is_waited_for(asm: AsmStore, scripted: ScriptedStore) -> None:
    scripted.opening = lambda number: time.sleep(0.3)
    with Fabric(asm=asm._endpoint.address, timeout_seconds=0.1) as fabric:
        with fabric.asm.open("rules") as mapped:
            assert mapped.name == "rules"
        with pytest.raises(DeadlineExceeded):
            fabric.asm.open("rules", timeout_seconds=0.1)


def test_a_hold_waits_for_a_store_that_copies_first_and_says_when_that_takes_too_long(
    asm: AsmStore, scripted: ScriptedStore
) -> None:
    scripted.holding = lambda: time.sleep(0.3)
    with Fabric(asm=asm._endpoint.address, timeout_seconds=0.1) as fabric, fabric.asm.hold("rules") as held:
        assert (held.ref.name, held.stands) == ("rules", True)
    copied = threading.Event()
    scripted.holding = lambda: copied.wait(20)
    with pytest.raises(Unavailable, match=r"does not hold rules after 0\.1 s"):
        asm.hold("rules", timeout_seconds=0.1)
    copied.set()
    scripted.refusal = (grpc.StatusCode.UNAVAILABLE, (("treadle-error", "Unavailable"),))
    with pytest.raises(Unavailable, match=r"^said so$"):
        asm.hold("rules")


def test_a_model_that_does_not_fit_is_refused_by_the_field(asm: AsmStore, scripted: ScriptedStore) -> None:
    scripted.refusal = (grpc.StatusCode.FAILED_PRECONDITION, (("treadle-field", "model.rope"),))
    with pytest.raises(FingerprintMismatch) as refused:
        asm.open("rules", expected={"model.rope": "x"})
    assert refused.value.field == "model.rope"
