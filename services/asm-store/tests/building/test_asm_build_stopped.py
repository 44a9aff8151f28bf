"""Builds that were stopped, killed or torn: what goes on, what is made again, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asm_store.building.build import Build, Order
from asm_store.building.spill import Spill
from asm_store.building.work_folder import WorkFolder
from treadle.contract.dictionary_file import TENSORS_FILE, check_digests, map_tensors, read_manifest
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument, Unavailable
from treadle.nn.model import CausalLM

Orders = Callable[..., Order]


def whole(folder: Path) -> str:
    """The version of a dictionary each of whose bytes is there."""
    dictionary = read_manifest(folder)
    check_digests(map_tensors(folder / TENSORS_FILE, dictionary), dictionary)
    return dictionary.version


class Killed(Exception):
    """Stands for the end of the process, where the process is the test's."""


def stop_at(wanted: str, at: int) -> Callable[[str, int, int], None]:
    def watch(what: str, done: int, of: int) -> None:
        if what == wanted and done >= at:
            raise Killed

    return watch


@pytest.mark.parametrize(("what", "at"), [("collecting states", 300), ("clustering layers", 2), ("measuring fidelity", 1)])
def test_a_build_that_was_stopped_goes_on_to_the_same_version(
    order: Orders, tiny: CausalLM, tmp_path: Path, what: str, at: int
) -> None:
    expected, _ = Build(order(out=tmp_path / "expected"), model=tiny).run()
    wanted, told = order(out=tmp_path / "stopped"), list[tuple[str, int]]()
    with pytest.raises(Killed):
        Build(wanted, stop_at(what, at), model=tiny, checkpoint_seconds=0.0).run()
    assert not (wanted.out / "manifest.json").exists()
    found, _ = Build(wanted, lambda what, done, of: told.append((what, done)), model=tiny).run()
    assert found.version == expected.version
    collected = [done for name, done in told if name == "collecting states"]
    assert not collected or collected[0] > at


def test_an_unfinished_build_refuses_another_recipe_by_the_field(order: Orders, tiny: CausalLM) -> None:
    with pytest.raises(Killed):
        Build(order(), stop_at("clustering layers", 1), model=tiny).run()
    with pytest.raises(FingerprintMismatch, match=r"settings\.heads_joined"):
        Build(order(heads_joined=2), model=tiny)
    with pytest.raises(FingerprintMismatch, match="prefix"):
        Build(order(prefix=(1, 2, 3)), model=tiny)
    assert Build(order(heads_joined=2), model=tiny, restart=True).run()[0].settings.heads_joined == 2


def test_two_builds_do_not_share_a_folder_and_a_finished_one_is_kept(order: Orders, tiny: CausalLM) -> None:
    first = Build(order(), model=tiny)
    with pytest.raises(Unavailable, match="another process"):
        Build(order(), model=tiny)
    first.run()
    with pytest.raises(InvalidArgument, match="holds a dictionary already"):
        Build(order(), model=tiny)


def test_a_build_killed_before_it_removed_its_work_is_done(order: Orders, tiny: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = order()
    version = kill_in_removal(wanted, tiny, monkeypatch)
    card = json.loads((wanted.out / "card.json").read_text())
    shutil.rmtree(wanted.out / ".building" / "spill")  # as far as it came
    told: list[str] = []
    found, says = Build(wanted, lambda what, done, of: told.append(what), model=tiny).run()
    assert (found.version, says) == (version, card)
    assert set(told) == {"loading the model"}
    assert not (wanted.out / ".building").exists()
    with pytest.raises(InvalidArgument, match="holds a dictionary already"):
        Build(wanted, model=tiny)


@pytest.mark.parametrize(("other", "restart"), [({"prefix": (1, 2, 3)}, False), ({}, True)])
def test_what_a_killed_build_left_beside_its_dictionary_is_no_start_for_another(
    order: Orders, tiny: CausalLM, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], restart: bool
) -> None:
    wanted = order()
    version = kill_in_removal(wanted, tiny, monkeypatch)
    with pytest.raises(InvalidArgument, match="holds a dictionary already"):
        Build(order(**other), model=tiny, restart=restart)
    assert not (wanted.out / ".building").exists()
    assert whole(wanted.out) == version


@pytest.mark.parametrize("name", ["manifest.json", "dictionary.safetensors"])
def test_a_dictionary_torn_with_its_machine_is_made_again(
    order: Orders, tiny: CausalLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wanted = order()
    version = kill_in_removal(wanted, tiny, monkeypatch)
    os.truncate(wanted.out / name, 100)
    assert Build(wanted, model=tiny).run()[0].version == version
    assert whole(wanted.out) == version


@pytest.mark.parametrize("tear", [lambda data: b"", lambda data: data[:-1], lambda data: bytes(len(data))])
def test_a_layer_torn_with_its_machine_is_made_again(
    order: Orders, tiny: CausalLM, tmp_path: Path, tear: Callable[[bytes], bytes]
) -> None:
    expected, _ = Build(order(out=tmp_path / "expected"), model=tiny).run()
    wanted = order(out=tmp_path / "torn")
    with pytest.raises(Killed):
        Build(wanted, stop_at("writing", 0), model=tiny).run()
    path = min((wanted.out / ".building" / "layer1").iterdir())
    path.write_bytes(tear(path.read_bytes()))
    told: list[tuple[str, int]] = []
    found, _ = Build(wanted, lambda what, done, of: told.append((what, done)), model=tiny).run()
    assert found.version == expected.version == whole(wanted.out)
    assert not [done for what, done in told if what == "collecting states"]


def test_a_layer_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    work.keep_layer(0, {"keys": ("F32", np.ones((2, 3), np.float32))})
    (path,) = (work.path / "layer0").iterdir()
    os.truncate(path, 0)
    with pytest.raises(DataLoss, match=f"{path}.*--restart"):
        work.layer(0)
    work.close()


def test_what_a_build_keeps_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, synced = os.fsync, list[str]()

    def noted(descriptor: int) -> None:
        there = sorted(path.name for path in (tmp_path / ".building").iterdir() if path.name != "lock")
        synced.append(f"{Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)} beside {' '.join(there)}")
        fsync(descriptor)

    work = WorkFolder(tmp_path)
    monkeypatch.setattr(os, "fsync", noted)
    work.keep_traces([[1, 2], [3]])
    work.keep_layer(0, {"keys": ("F32", np.ones((2, 3), np.float32))})
    work.save({}, {"batches": 1})
    work.close()
    assert synced == [
        ".building/traces.json.partial beside traces.json.partial",
        ".building beside traces.json",
        ".building/layer0.partial/keys.F32.npy beside layer0.partial traces.json",
        ".building/layer0.partial beside layer0.partial traces.json",
        ".building beside layer0 traces.json",
        ".building/state.json.partial beside layer0 state.json.partial traces.json",
        ".building beside layer0 state.json traces.json",
    ]


def test_what_was_collected_lasts_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, synced = os.fsync, list[str]()

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    spill = Spill(tmp_path / "spill", (0,), heads=1, head_dim=2, exact=True)
    spill.append(0, torch.ones(3, 1, 2), torch.ones(3, 1, 2), torch.ones(3, 1))
    spill.flush()
    assert sorted(synced[:3]) == ["0.log_z", "0.queries", "0.states"]
    assert synced[3:] == ["spill"]


def test_a_dictionary_that_came_from_elsewhere_ends_no_unfinished_build(
    build: Orders, order: Orders, tiny: CausalLM, tmp_path: Path
) -> None:
    other, wanted = build(out=tmp_path / "other", seed=5), order()
    with pytest.raises(Killed):
        Build(wanted, stop_at("clustering layers", 2), model=tiny).run()
    shutil.copytree(other.out, wanted.out, dirs_exist_ok=True)
    with pytest.raises(InvalidArgument, match="holds a dictionary already"):
        Build(wanted, model=tiny)
    (wanted.out / "manifest.json").unlink()
    told: list[str] = []
    Build(wanted, lambda what, done, of: told.append(what), model=tiny).run()
    assert "collecting states" not in told


def kill_in_removal(wanted: Order, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> str:
    """Carry the order out until its work is to be removed; the version that it made."""

    def killed(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("asm_store.building.work_folder.WorkFolder.remove", killed)
        with pytest.raises(Killed):
            Build(wanted, model=model).run()
    assert (wanted.out / ".building" / "spill").is_dir()
    return whole(wanted.out)


PROGRAM = """
import os, signal, sys
from asm_store.building.build import Build
from conftest import build_of
def watch(what, done, of):
    if what == sys.argv[3] and done >= int(sys.argv[4]):
        os.kill(os.getpid(), int(sys.argv[5]))
Build(build_of(sys.argv[1], sys.argv[2]), watch, checkpoint_seconds=0.0).run()
"""


def run_until(folder: Path, out: Path, what: str, at: int, number: int) -> int:
    """The exit status of a process that builds and gets signal `number` on the way."""
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    arguments = [sys.executable, "-c", PROGRAM, str(folder), str(out), what, str(at), str(int(number))]
    return subprocess.run(arguments, env=os.environ | {"PYTHONPATH": path}, timeout=120, capture_output=True).returncode


def test_kill_9_loses_nothing_but_time(order: Orders, tiny: CausalLM, tiny_folder: Path, tmp_path: Path) -> None:
    expected, _ = Build(order(out=tmp_path / "expected"), model=tiny).run()
    out = tmp_path / "killed"
    assert run_until(tiny_folder, out, "collecting states", 200, signal.SIGKILL) == -signal.SIGKILL
    assert (out / ".building" / "state.json").exists()
    told: list[tuple[str, int]] = []
    found, _ = Build(order(out=out), lambda what, done, of: told.append((what, done)), model=tiny).run()
    assert found.version == expected.version
    assert next(done for what, done in told if what == "collecting states") > 200


def test_ctrl_c_is_obeyed_between_steps_and_keeps_what_is_done(
    order: Orders, tiny: CausalLM, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "stopped"
    assert run_until(tiny_folder, out, "collecting states", 200, signal.SIGINT) != 0
    told: list[tuple[str, int]] = []
    Build(order(out=out), lambda what, done, of: told.append((what, done)), model=tiny).run()
    assert next(done for what, done in told if what == "collecting states") > 200
