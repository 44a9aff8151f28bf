"""Where memory lies: the nodes as sysfs tells them, the policy as the kernel keeps it."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from treadle.contract import InvalidArgument, Unavailable
from treadle.kernels import numa
from treadle.kernels.numa import Policy

LENGTH = 1 << 20


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    folder = tmp_path / "devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0-2\n")
    (folder / "has_memory").write_text("0-1\n")  # node 2 has processors only
    return tmp_path


@pytest.fixture
def mapping() -> mmap.mmap:
    return mmap.mmap(-1, LENGTH)


def address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)


def kept_policy(mapping: mmap.mmap) -> str:
    """What the kernel says about the mapping, such as bind:0."""
    start = f"{address_of(mapping):x} "
    lines = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if line.startswith(start)]
    return lines[0].split()[1] if lines else "default"


def needs_mbind() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel was built without NUMA: policies cannot be set nor read; run on one with CONFIG_NUMA")
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        numa.bind(address_of(page), mmap.PAGESIZE, Policy.BIND, (0,))
    except Unavailable as error:
        pytest.skip(f"mbind is forbidden here ({error}); allow it in the container's seccomp profile")


def test_nodes_with_memory_are_read_from_sysfs(two_nodes: Path) -> None:
    assert numa.nodes(two_nodes) == (0, 1)
    (two_nodes / "devices/system/node/has_memory").write_text("0,2-3,7\n")
    assert numa.nodes(two_nodes) == (0, 2, 3, 7)


def test_a_kernel_that_tells_nothing_has_one_node(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == (0,)


def test_a_list_that_is_none_is_refused(two_nodes: Path) -> None:
    (two_nodes / "devices/system/node/has_memory").write_text("all\n")
    with pytest.raises(InvalidArgument, match="has_memory: a list of nodes"):
        numa.nodes(two_nodes)


@pytest.mark.parametrize(
    ("policy", "on", "kept"),
    [(Policy.BIND, (0,), "bind:0"), (Policy.PREFERRED, (0,), "prefer:0"), (Policy.INTERLEAVE, (0,), "interleave:0"), (Policy.LOCAL, (), "local")],
)  # fmt: skip
def test_the_kernel_keeps_the_policy_that_was_asked_for(mapping: mmap.mmap, policy: Policy, on: tuple[int, ...], kept: str) -> None:
    needs_mbind()
    numa.bind(address_of(mapping), LENGTH, policy, on)
    assert kept_policy(mapping) == kept


def test_a_file_in_memory_keeps_the_policy_for_whoever_maps_it(two_nodes: Path) -> None:
    needs_mbind()
    file = os.memfd_create("table")
    os.ftruncate(file, LENGTH)
    mapping = mmap.mmap(file, LENGTH)
    assert numa.place(address_of(mapping), LENGTH, "node:0", two_nodes) == "node:0: on node 0"
    os.posix_fallocate(file, 0, LENGTH)
    again = mmap.mmap(file, LENGTH, prot=mmap.PROT_READ)
    os.close(file)
    assert kept_policy(mapping) == kept_policy(again) == "bind:0"


def test_places_are_named_on_a_machine_with_two_nodes(two_nodes: Path, mapping: mmap.mmap) -> None:
    needs_mbind()
    assert numa.place(address_of(mapping), LENGTH, "local", two_nodes).startswith("local: each page on the node")
    assert kept_policy(mapping) == "local"
    real = numa.nodes()
    if len(real) == 1:  # the kernel knows better than our sysfs
        with pytest.raises(InvalidArgument, match="bind on node 1: Invalid argument"):
            numa.place(address_of(mapping), LENGTH, "node:1", two_nodes)


@pytest.mark.parametrize("policy", ["local", "interleave", "node:0"])
def test_one_node_leaves_nothing_to_do_and_says_so(tmp_path: Path, mapping: mmap.mmap, policy: str) -> None:
    assert numa.place(address_of(mapping), LENGTH, policy, tmp_path) == f"{policy}: nothing to do, this machine has one memory node"
    assert kept_policy(mapping) == "default"


@pytest.mark.parametrize(("policy", "message"), [("node:2", "memory on nodes 0, 1"), ("node:x", '"node:N"'), ("near", '"local"')])
def test_a_policy_that_is_none_is_refused(two_nodes: Path, mapping: mmap.mmap, policy: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        numa.place(address_of(mapping), LENGTH, policy, two_nodes)


@pytest.mark.parametrize(
    ("offset", "length", "policy", "on"),
    [(1, LENGTH, Policy.BIND, (0,)), (0, 0, Policy.BIND, (0,)), (0, LENGTH, Policy.BIND, ()), (0, LENGTH, Policy.LOCAL, (0,)),
     (0, LENGTH, Policy.BIND, (-1,)), (0, LENGTH, Policy.BIND, (numa.NODES_MAX,))],
)  # fmt: skip
def test_what_cannot_be_bound_is_refused(mapping: mmap.mmap, offset: int, length: int, policy: Policy, on: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        numa.bind(address_of(mapping) + offset, length, policy, on)


def test_memory_that_is_not_mapped_is_named_as_such(mapping: mmap.mmap) -> None:
    needs_mbind()
    with pytest.raises(InvalidArgument, match="the address inside a mapping"):
        numa.bind(address_of(mapping) + (1 << 40), LENGTH, Policy.BIND, (0,))
