"""Which memory node holds a mapping, where a machine has more than one: mbind by the system call itself, no library needed.

Owns the nodes of this machine and the policy of a stretch of memory. Which table goes where is the pool's choice.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from treadle.contract import InvalidArgument, ResourceExhausted, Unavailable

__all__ = ["Policy", "bind", "check_policy", "nodes", "place"]

SYSFS = Path("/sys")
NODES_MAX = 1024  # of a Linux kernel (MAX_NUMNODES); also the bits of the mask handed to it
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235}  # asm/unistd.h
_MF_MOVE = 1 << 1  # linux/mempolicy.h


class Policy(IntEnum):
    """What the kernel does with a page that has to be found (linux/mempolicy.h)."""

    PREFERRED = 1  # on that node, elsewhere when it is full
    BIND = 2  # on that node or not at all: a full node is an error
    INTERLEAVE = 3  # page by page round all of them
    LOCAL = 4  # on the node of whoever touches it first


def nodes(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Numbers of the nodes that have memory, rising; (0,) where the kernel tells of none."""
    for name in ("has_memory", "online"):
        path = sysfs / "devices/system/node" / name
        if path.exists():
            return _parsed(path.read_text(), path)
    return (0,)


def bind(address: int, length: int, policy: Policy, on: Sequence[int] = (), *, move: bool = True) -> None:
    """Set the policy of the pages in [address, address + length); for a shared mapping, of the file's pages behind it.

    address: on a page boundary; length: bytes, > 0
    on:      node numbers; none for LOCAL
    move:    move the pages that are there already and that only this process maps; those of other processes stay where they are
    Raises InvalidArgument for what does not fit, ResourceExhausted when a node has no room, Unavailable where the kernel or a
    container forbids it.
    """
    if address % mmap.PAGESIZE or length <= 0:
        raise InvalidArgument(f"address on a boundary of {mmap.PAGESIZE} and length > 0 expected, got {address:#x}, {length}")
    if bool(on) == (policy is Policy.LOCAL) or not all(0 <= node < NODES_MAX for node in on):
        raise InvalidArgument(f"on: nodes 0 to {NODES_MAX - 1} for {policy.name}, none for LOCAL, got {list(on)}")
    number = _MBIND.get(platform.machine())
    if number is None:
        raise Unavailable(f"numa: no mbind known for {platform.machine()}; start the process under numactl instead")
    mask = sum(1 << node for node in set(on)).to_bytes(NODES_MAX // 8, "little")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    failed = call(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(length), ctypes.c_ulong(policy),
        ctypes.c_char_p(mask) if on else None, ctypes.c_ulong(NODES_MAX + 1 if on else 0), ctypes.c_ulong(_MF_MOVE if move else 0),
    )  # fmt: skip
    if failed:
        raise _refused(ctypes.get_errno(), policy, on)


def check_policy(policy: str, sysfs: Path = SYSFS) -> None:
    """Raise InvalidArgument unless `place` would know this policy on this machine."""
    _wanted(policy, nodes(sysfs))


def place(address: int, length: int, policy: str, sysfs: Path = SYSFS) -> str:
    """Put a mapping where `policy` says; call it before the pages are touched or allocated. Returns what was done, for logs.

    policy: "local" (the node of whoever touches a page first), "interleave" (round all nodes) or "node:N" (there, an error when
            it is full)
    On a machine with one node nothing is done, and that is what the sentence says. For a file in tmpfs: after ftruncate and mmap,
    before fallocate, which otherwise takes the pages from the caller's own node. Raises as `bind`; InvalidArgument for another
    policy or a node that is not there.
    """
    there = nodes(sysfs)
    wanted = _wanted(policy, there)
    if len(there) == 1:
        return f"{policy}: nothing to do, this machine has one memory node"
    if policy == "local":
        bind(address, length, Policy.LOCAL)
        return "local: each page on the node that touches it first"
    bind(address, length, Policy.INTERLEAVE if policy == "interleave" else Policy.BIND, wanted)
    return f"{policy}: on {'nodes' if len(wanted) > 1 else 'node'} {', '.join(map(str, wanted))}"


def _wanted(policy: str, there: tuple[int, ...]) -> tuple[int, ...]:
    if policy in ("local", "interleave"):
        return there
    kind, _, number = policy.partition(":")
    if kind != "node" or not number.isdecimal():
        raise InvalidArgument(f'numa: "local", "interleave" or "node:N" expected, got {policy!r}')
    if int(number) not in there:
        raise InvalidArgument(f"numa: {policy}: this machine has memory on {_named(there)}")
    return (int(number),)


def _refused(code: int, policy: Policy, on: Sequence[int]) -> Exception:
    what = f"numa: {policy.name.lower()} on {_named(on) if on else 'the local node'}: {os.strerror(code)}"
    if code in (errno.ENOMEM, errno.EIO):
        return ResourceExhausted(f"{what}; that node has no room for the pages: choose another, or interleave")
    if code in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        return Unavailable(f"{what}; a container may need the system call mbind allowed (CAP_SYS_NICE or its seccomp profile)")
    return InvalidArgument(f"{what}; is that a node of this machine, and the address inside a mapping?")


def _named(there: Sequence[int]) -> str:
    return f"{'node' if len(there) == 1 else 'nodes'} {', '.join(map(str, there))}"


def _parsed(text: str, path: Path) -> tuple[int, ...]:
    """Numbers of a list as the kernel writes it: "0-1,3"."""
    found: list[int] = []
    try:
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError as error:
        raise InvalidArgument(f"{path}: a list of nodes such as 0-1,3 expected, got {text.strip()!r}") from error
    return tuple(found)
