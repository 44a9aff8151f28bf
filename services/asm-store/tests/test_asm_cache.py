"""A store whose files this process cannot see: brought into a cache, shared, bounded, and never in part.

The store keeps its folder under /proc/self/cwd, which means its own working directory to it, and ours to us.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import numpy as np
import pytest

from treadle.client.asm import DictionaryCache
from treadle.client.asm import cache as cache_module
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE
from treadle.contract.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable

if TYPE_CHECKING:
    from tests.conftest import Made, Make, Process, StartStore

HERE = Path("/proc/self/cwd")
pytestmark = pytest.mark.skipif(not HERE.exists(), reason="no /proc here: a store cannot be given a folder that only it sees")
OPEN_AND_SAY = """
import sys
from pathlib import Path
from treadle.client import Fabric
from treadle.client.asm import DictionaryCache
address, folder, version = sys.argv[1:]
with Fabric(asm=address) as fabric, fabric.asm.open("rules", version, cache=DictionaryCache(Path(folder), 1 << 30), verify=True) as mapped:
    print("mapped", mapped.version, flush=True)
    sys.stdin.read()
"""
BRING_AND_STOP = """
import sys
from pathlib import Path
from treadle.client import Fabric
from treadle.client.asm import AsmStore, DictionaryCache
address, folder, version = sys.argv[1:]
get = AsmStore.get
def stop(progress):
    print("begun", progress.bytes_done, flush=True)
    sys.stdin.read()
AsmStore.get = lambda self, ref, folder, **more: get(self, ref, folder, progress=stop, **more)
with Fabric(asm=address) as fabric:
    fabric.asm.open("rules", version, cache=DictionaryCache(Path(folder), 1 << 30))
"""
Until = Callable[[Callable[[], bool], str], None]
Another = Callable[[str, str], "subprocess.Popen[str]"]


class Counted:
    """A CacheObserver."""

    def __init__(self) -> None:
        self.hits, self.evictions = 0, 0
        self.fetches: list[tuple[str, int]] = []

    def cache_hit(self) -> None:
        self.hits += 1

    def cache_fetched(self, outcome: str, nbytes: int) -> None:
        self.fetches.append((outcome, nbytes))

    def cache_evicted(self) -> None:
        self.evictions += 1


@pytest.fixture
def far(start_store: StartStore, tmp_path: Path) -> Iterator[Process]:
    (tmp_path / "far").mkdir()
    with start_store(HERE / "data", cwd=tmp_path / "far") as process:
        yield process


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def cache(tmp_path: Path, counted: Counted) -> DictionaryCache:
    return DictionaryCache(tmp_path / "cache", 1 << 30, counted)


@pytest.fixture
def another(far: Process, tmp_path: Path) -> Iterator[Another]:
    """Starts a process that runs a script with store, cache folder and version; killed at the end."""
    children: list[subprocess.Popen[str]] = []

    def run(script: str, version: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", script, far.address, str(tmp_path / "cache"), version]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


def gets(process: Process) -> float:
    with urlopen(f"http://{process.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("treadle_asm_gets_total"))


def same(mapped: Any, made: Made) -> bool:
    return all(np.array_equal(mapped.tensors[name], made.tensors[name]) for name in made.tensors)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_cannot_be_mapped_where_it_lies_is_brought_once_and_mapped(
    far: Process, make: Make, cache: DictionaryCache, counted: Counted, tmp_path: Path
) -> None:
    made, asm = make(prefix_kv=True), far.fabric.asm
    stored = asm.publish(made.folder).stored
    with pytest.raises(NotFound, match="another host"):
        asm.open("rules")
    assert asm.find("rules").readers == 0
    for hits in range(2):
        with asm.open("rules", cache=cache) as mapped:
            assert same(mapped, made)
            assert mapped.prefix_kv_path == tmp_path / "cache" / made.version / PREFIX_KV_FILE
            assert mapped.prefix_kv_path.read_bytes() == (made.folder / PREFIX_KV_FILE).read_bytes()
        assert (gets(far), counted.hits, counted.fetches) == (1, hits, [("ok", stored.file_bytes)])
    assert cache.nbytes == stored.file_bytes


def test_a_host_with_folders_of_the_same_names_is_another_host_all_the_same(
    far: Process, make: Make, cache: DictionaryCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    far.fabric.asm.publish(made.folder)
    (tmp_path / "near" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "near")
    with far.fabric.asm.open("rules", cache=cache) as mapped:
        assert same(mapped, made)


def test_another_stores_copy_at_the_same_path_is_read_as_it_is_laid_out_itself(
    far: Process, start_store: StartStore, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    far.fabric.asm.publish(made.folder)
    (tmp_path / "near").mkdir()
    data = (made.folder / TENSORS_FILE).read_bytes()
    longer = int.from_bytes(data[:8], "little") + 64
    (made.folder / TENSORS_FILE).write_bytes(longer.to_bytes(8, "little") + data[8 : longer - 56] + b" " * 64 + data[longer - 56 :])
    with start_store(HERE / "data", cwd=tmp_path / "near") as near:
        assert near.fabric.asm.publish(made.folder).stored.version == made.version
    monkeypatch.chdir(tmp_path / "near")
    with far.fabric.asm.open("rules") as mapped:
        assert same(mapped, made)


def test_the_least_recently_used_goes_and_what_is_open_stays(far: Process, make: Make, tmp_path: Path, counted: Counted) -> None:
    versions = [far.fabric.asm.publish(make(seed=seed).folder).stored for seed in range(4)]
    small = DictionaryCache(tmp_path / "cache", versions[0].file_bytes * 5 // 2, counted)

    def kept() -> set[str]:
        return {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}

    def opened(place: int) -> Any:
        return far.fabric.asm.open("rules", versions[place].version, cache=small)

    for place in (0, 1, 0, 2):
        opened(place).close()
        os.utime(tmp_path / "cache" / f"{versions[place].version}.lock", (place, len(counted.fetches) + counted.hits))
    assert (kept(), counted.evictions) == ({versions[0].version, versions[2].version}, 1)
    with opened(0), opened(2):
        with pytest.raises(ResourceExhausted, match="asm_cache_bytes_max"):
            opened(3)
        assert counted.fetches[-1] == ("failed", 0)
        assert names(tmp_path / "cache") == kept() | {f"{version}.lock" for version in kept()} | {".lock"}
    opened(3).close()
    assert small.nbytes <= small.bytes_max


def test_a_file_that_was_damaged_on_the_disk_is_brought_again(
    far: Process, make: Make, cache: DictionaryCache, tmp_path: Path
) -> None:
    made = make(prefix_kv=True)
    far.fabric.asm.publish(made.folder)
    for count, name in enumerate((TENSORS_FILE, PREFIX_KV_FILE), 2):
        far.fabric.asm.open("rules", cache=cache).close()
        path = tmp_path / "cache" / made.version / name
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        with far.fabric.asm.open("rules", cache=cache) as mapped:
            mapped.verify()
        assert gets(far) == count


def test_a_damaged_file_that_another_process_has_open_is_no_damage_of_the_stores(
    far: Process, make: Make, cache: DictionaryCache, another: Another, tmp_path: Path
) -> None:
    made = make()
    far.fabric.asm.publish(made.folder)
    child = another(OPEN_AND_SAY, made.version)
    assert child.stdout is not None
    assert child.stdout.readline() == f"mapped {made.version}\n"
    path = tmp_path / "cache" / made.version / TENSORS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Unavailable, match="another process has it open"):
        far.fabric.asm.open("rules", cache=cache)
    child.communicate()
    with far.fabric.asm.open("rules", cache=cache) as mapped:
        assert same(mapped, made)


def test_a_process_that_is_killed_while_it_brings_a_version_leaves_nothing_that_is_served(
    far: Process, make: Make, cache: DictionaryCache, another: Another, tmp_path: Path
) -> None:
    made, other = make(seed=1), make(seed=2, name="guide")
    stored = far.fabric.asm.publish(made.folder).stored
    far.fabric.asm.publish(other.folder)
    for opened in (other, made):  # another version sweeps what was left; and so does the same
        child = another(BRING_AND_STOP, made.version)
        assert child.stdout is not None
        assert child.stdout.readline().startswith("begun")
        (partial,) = (tmp_path / "cache").glob(f".{made.version}.*")
        assert not (tmp_path / "cache" / made.version).exists()
        assert cache.nbytes >= stored.file_bytes  # reserved
        child.send_signal(signal.SIGKILL)
        child.wait(20)
        with far.fabric.asm.open(opened.name, cache=cache) as mapped:
            assert same(mapped, opened)
        assert not partial.exists()


def test_processes_that_share_a_folder_bring_a_version_once(
    far: Process, make: Make, cache: DictionaryCache, counted: Counted, another: Another, tmp_path: Path
) -> None:
    made = make()
    far.fabric.asm.publish(made.folder)
    children = [another(OPEN_AND_SAY, made.version) for _ in range(3)]
    assert [child.stdout.readline() for child in children if child.stdout] == [f"mapped {made.version}\n"] * 3
    assert gets(far) == 1
    cache.keep_listed(far.address, set())  # it is theirs: it stays
    assert (tmp_path / "cache" / made.version).is_dir()
    for child in children:
        child.communicate()
    cache.keep_listed("another:1", set())
    assert (tmp_path / "cache" / made.version).is_dir()
    cache.keep_listed(far.address, {made.version})
    assert counted.evictions == 0
    cache.keep_listed(far.address, set())
    assert (names(tmp_path / "cache"), counted.evictions, cache.nbytes) == ({".lock"}, 1, 0)


def test_who_waits_for_another_process_ends_with_its_cache_or_its_time(
    far: Process, make: Make, cache: DictionaryCache, another: Another, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    far.fabric.asm.publish(made.folder)
    child = another(BRING_AND_STOP, made.version)
    assert child.stdout is not None
    assert child.stdout.readline().startswith("begun")
    monkeypatch.setattr(cache_module, "FETCH_SECONDS_MAX", 0.2)
    with pytest.raises(Unavailable, match="another process holds it"):
        far.fabric.asm.open("rules", cache=cache)
    monkeypatch.undo()
    cache.close()
    with pytest.raises(Unavailable, match="was closed"):
        far.fabric.asm.open("rules", cache=cache)


def test_a_folder_that_others_may_write_into_is_refused(far: Process, make: Make, cache: DictionaryCache, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(InvalidArgument, match="chmod 700"):
        cache.prepare()
    far.fabric.asm.publish(make().folder)
    with pytest.raises(Unavailable, match="chmod 700"):
        far.fabric.asm.open("rules", cache=cache)
    with pytest.raises(InvalidArgument, match="at least 1"):
        DictionaryCache(tmp_path, 0)


def test_more_bytes_than_were_told_are_refused(far: Process, make: Make, tmp_path: Path) -> None:
    far.fabric.asm.publish(make().folder)
    with pytest.raises(ResourceExhausted, match="100 are allowed"):
        far.fabric.asm.get("rules", tmp_path / "got", bytes_max=100)
    assert not (tmp_path / "got").exists()
