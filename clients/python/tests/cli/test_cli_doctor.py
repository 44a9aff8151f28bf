"""The doctor, on machines made of files."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from treadle.asm.v1 import asm_store_pb2 as asm_pb
from treadle.asm.v1 import asm_store_pb2_grpc as asm_pb_grpc
from treadle.cli.doctor import devices, memory, processor, running, software
from treadle.cli.doctor.command import CHECKS, doctor
from treadle.cli.doctor.finding import Finding, Host, Level
from treadle.cli.process_mark import ProcessMark
from treadle.cli.run_folder import FabricState, RunFolder, ServiceRecord
from treadle.contract import PROTO_VERSION
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

CPU = (
    "processor\t: 0\nmodel name\t: Loom 9000\nflags\t\t: fpu sse4_2 avx2 avx512f clwb\n\nprocessor\t: 1\nmodel name\t: Loom 9000\n"
)
MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"
THP = "/sys/kernel/mm/transparent_hugepage"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[dict[str, str]], Host]:
    def make(files: dict[str, str]) -> Host:
        for name, text in files.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Host(tmp_path, search_path=str(tmp_path / "bin"))

    return make


Machine = Callable[[dict[str, str]], Host]


def test_the_cpu_is_named_with_the_instructions_that_matter(machine: Machine) -> None:
    finding = processor.cpu(machine({"/proc/cpuinfo": CPU, "/sys/fs/cgroup/cpu.max": "150000 100000"}))
    assert finding.found == "Loom 9000, 2 cores, sse4.2 avx2 avx512 clwb (limited to 1.5 by the container)"
    assert finding.level is Level.OK


def test_a_cpu_without_checksum_instructions_is_a_warning(machine: Machine) -> None:
    finding = processor.cpu(machine({"/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu\n"}))
    assert finding.level is Level.WARN
    assert finding.advice


def test_one_core_is_a_warning(machine: Machine) -> None:
    assert processor.cpu(machine({"/proc/cpuinfo": "processor\t: 0\nflags\t\t: sse4_2\n"})).level is Level.WARN


def test_a_numa_node_without_cpus_is_far_memory_and_the_advice_binds_to_it(machine: Machine) -> None:
    node = "/sys/devices/system/node"
    far = {f"{node}/node0/cpulist": "0-1", f"{node}/node1/cpulist": "", f"{node}/node1/meminfo": "Node 1 MemTotal: 134217728 kB"}
    finding = processor.numa(machine(far))
    assert "node1 128.0 GiB without CPUs" in finding.found
    assert "bind:1" in finding.advice


def test_two_numa_nodes_with_cpus_are_advised_to_share_one(machine: Machine) -> None:
    node = "/sys/devices/system/node"
    assert "numactl" in processor.numa(machine({f"{node}/node0/cpulist": "0", f"{node}/node1/cpulist": "1"})).advice


def test_memory_is_told_with_the_limit_of_the_container(machine: Machine) -> None:
    finding = memory.memory(machine({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": str(4 << 30)}))
    assert finding.found.startswith("16.0 GiB, 8.0 GiB available, container limit 4.0 GiB")
    assert memory.memory(machine({"/proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 8 kB\n"})).level is Level.WARN


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("always [madvise] never", Level.OK),
        ("[always] madvise never", Level.OK),
        ("always madvise [never]", Level.WARN),
        ("", Level.WARN),
    ],
)
def test_private_huge_pages(machine: Machine, text: str, level: Level) -> None:
    assert memory.huge_anonymous(machine({f"{THP}/enabled": text})).level is level


@pytest.mark.parametrize(
    ("option", "chosen", "level"),
    [("huge=always", "never", Level.OK), ("huge=advise", "never", Level.OK), ("huge=never", "force", Level.OK), ("size=1G", "always", Level.INFO),
     ("huge=never", "never", Level.INFO), ("huge=always", "deny", Level.WARN)],
)  # fmt: skip
def test_huge_pages_of_shared_memory_are_those_of_its_mount(machine: Machine, option: str, chosen: str, level: Level) -> None:
    text = "always within_size advise never deny force".replace(chosen, f"[{chosen}]")
    finding = memory.huge_shared(machine({f"{THP}/shmem_enabled": text, "/proc/mounts": f"tmpfs /dev/shm tmpfs rw,{option} 0 0"}))
    assert finding.level is level
    assert bool(finding.advice) is (level is not Level.OK)


def test_mounts_that_give_huge_pages_are_listed(machine: Machine) -> None:
    mounts = (
        "tmpfs /dev/shm tmpfs rw 0 0\ntmpfs /mnt/t tmpfs rw,huge=always,size=4G 0 0\nnone /mnt/h hugetlbfs rw,pagesize=2M 0 0\n"
    )
    assert memory.huge_mounts(machine({"/proc/mounts": mounts})).found == "/mnt/t (huge=always)"
    assert memory.huge_mounts(machine({"/proc/mounts": "tmpfs /dev/shm tmpfs rw,huge=never 0 0"})).found == "none"


def test_reserved_huge_pages_are_counted(machine: Machine) -> None:
    pages, mounts = "/sys/kernel/mm/hugepages/hugepages-2048kB", "none /mnt/h hugetlbfs rw,pagesize=2M 0 0\n"
    host = machine({f"{pages}/nr_hugepages": "64", f"{pages}/free_hugepages": "60", "/proc/mounts": mounts})
    assert memory.hugetlb(host).found == "2 MiB: 64, 60 free; hugetlbfs at /mnt/h"
    assert memory.hugetlb(machine({f"{pages}/nr_hugepages": "0"})).found == "none"


def test_a_machine_without_dev_shm_is_a_warning(machine: Machine) -> None:
    assert memory.shared_memory(machine({})).level is Level.WARN
    assert "free" in memory.shared_memory(machine({"/dev/shm/x": ""})).found


def test_devices_are_named_where_they_are(machine: Machine) -> None:
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    host = machine(
        {
            "/dev/dax0.0": "", "/sys/bus/dax/devices/dax0.0/size": str(64 << 30), "/sys/bus/cxl/devices/mem0/x": "",
            f"{port}/state": "4: ACTIVE", f"{port}/rate": "200 Gb/sec (4X HDR)",
            "/proc/driver/nvidia/version": "NVRM version: 1", "/proc/driver/nvidia/gpus/0000:01:00.0/information": "",
        }
    )  # fmt: skip
    assert devices.dax(host).found == "dax0.0 (64 GiB)"
    assert devices.cxl(host).found == "mem0"
    assert devices.rdma(host).found == "mlx5_0/1 ACTIVE 200 Gb/sec (4X HDR)"
    assert devices.gpu(host).level is Level.WARN  # a driver, but no nvidia-smi that answers


def test_an_rdma_port_that_is_down_is_a_warning(machine: Machine) -> None:
    assert devices.rdma(machine({"/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"})).level is Level.WARN


def test_a_bare_machine_has_no_devices_and_no_warning_for_it(machine: Machine) -> None:
    host = machine({})
    found = [check(host) for check in (devices.dax, devices.cxl, devices.rdma, devices.gpu)]
    assert {finding.found for finding in found} == {"none"}
    assert {finding.level for finding in found} == {Level.INFO}


def test_gpus_are_as_nvidia_smi_says(machine: Machine, tmp_path: Path) -> None:
    host = machine({"/bin/nvidia-smi": "#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\n"})
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    assert devices.gpu(host).found == "NVIDIA H200, 143771 MiB"


def test_a_program_that_fails_is_as_if_it_were_not_there(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    host = machine({"/bin/c++": "#!/bin/sh\nexit 1\n"})
    (tmp_path / "bin" / "c++").chmod(0o755)
    assert software.compiler(host).found == "none"


def test_a_module_that_does_not_load_is_told_with_its_reason() -> None:
    assert software.implementation("no_such_module") == "does not load: ModuleNotFoundError: No module named 'no_such_module'"


def test_the_loops_in_use_are_those_that_the_modules_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_KERNELS", "numpy")
    kernels, _ = software.loops(Host())
    assert (kernels.found, kernels.level) == ("numpy", Level.WARN)


def test_every_check_survives_a_machine_of_which_nothing_can_be_read(machine: Machine) -> None:
    host = machine({})
    for check in CHECKS:
        found = check(host)
        for finding in found if isinstance(found, list) else [found]:
            assert isinstance(finding, Finding)
            assert finding.found
            assert finding.means
            assert finding.advice or finding.level is not Level.WARN


def test_findings_are_json_for_programs_and_fit_the_screen_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor(as_json=True, root=tmp_path)
    assert set(json.loads(capsys.readouterr().out)["findings"][0]) == {"name", "found", "means", "advice", "level"}
    doctor(as_json=False, root=Path("/"))
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


def test_mooncake_is_found_or_the_finding_says_how_to_get_it() -> None:
    finding = software.mooncake(Host())
    if finding.level is Level.OK:
        assert importlib.util.find_spec("mooncake") is not None
    else:
        assert "pip install treadle[mooncake]" in finding.advice


class FullStore(asm_pb_grpc.AsmStoreServiceServicer):
    kept = 300

    def Status(self, request: Any, context: Any) -> asm_pb.StatusResponse:  # noqa: N802
        return asm_pb.StatusResponse(proto_version=PROTO_VERSION, versions=3, file_bytes=self.kept * 10**6, file_bytes_max=10**9)


class PoolWithDoors(pb_grpc.EngramPoolServiceServicer):
    def Status(self, request: Any, context: Any) -> pb.StatusResponse:  # noqa: N802 - gRPC's name
        doors = [pb.Door(transport="ring", address="unix:/run/ring"), pb.Door(transport="socket", address="127.0.0.1:7422")]
        return pb.StatusResponse(proto_version=PROTO_VERSION, doors=doors)


def test_the_doors_of_a_running_pool_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path))
    assert running.doors(Host()).found == "no pool of `treadle up` runs"
    server = grpc.server(ThreadPoolExecutor(1))
    pb_grpc.add_EngramPoolServiceServicer_to_server(PoolWithDoors(), server)  # type: ignore[abstract]
    listen = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    pool = ServiceRecord("engram-pool", "ready", listen)
    state = FabricState(ProcessMark.of(os.getpid()), "ready", "http://127.0.0.1:1", str(tmp_path), services=(pool,))
    folder = RunFolder(tmp_path)
    with folder.lock():
        folder.write(state)
        server.start()
        assert running.doors(Host()).found == "ring unix:/run/ring, socket 127.0.0.1:7422"
        server.stop(None).wait(10)
        finding = running.doors(Host())
        assert (finding.level, finding.found.startswith(listen)) == (Level.WARN, True)


def test_what_was_brought_from_stores_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path))
    assert running.dictionary_cache(Host()).level is Level.INFO
    cache = tmp_path / "asm-cache"
    for version in ("ab" * 32, "cd" * 32):
        (cache / version).mkdir(parents=True)
        (cache / version / "dictionary.safetensors").write_bytes(bytes(3_000_000))
    (cache / f"{'ef' * 32}.lock").write_text('{"bytes": 4000000, "store": "far:7402"}')
    finding = running.dictionary_cache(Host())
    assert finding.found == f"{cache}: 2 versions, 10.0 MB, 1 on their way in, or left by a worker that was killed"


def test_what_a_running_store_keeps_is_told_and_a_full_one_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path))
    assert running.dictionaries(Host()).found == "no store of `treadle up` runs"
    server, full = grpc.server(ThreadPoolExecutor(1)), FullStore()  # type: ignore[abstract]  # doctor asks for no more
    asm_pb_grpc.add_AsmStoreServiceServicer_to_server(full, server)
    listen = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    store = ServiceRecord("asm-store", "ready", listen)
    state = FabricState(ProcessMark.of(os.getpid()), "ready", "http://127.0.0.1:1", str(tmp_path), services=(store,))
    folder = RunFolder(tmp_path)
    with folder.lock():
        folder.write(state)
        server.start()
        finding = running.dictionaries(Host())
        assert (finding.level, finding.found) == (Level.OK, "3 versions, 300.0 MB of 1000.0 MB")
        full.kept = 950
        assert running.dictionaries(Host()).level is Level.WARN
        server.stop(None).wait(10)
        finding = running.dictionaries(Host())
        assert (finding.level, finding.found.startswith(listen)) == (Level.WARN, True)
