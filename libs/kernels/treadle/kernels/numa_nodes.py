"""On which memory nodes the pages of an array lie, by asking the kernel about a few of them.

Owns the question. Where pages are put is `numa`'s.
"""

from __future__ import annotations

import ctypes
import platform
from collections import Counter

import numpy as np
from numpy.typing import NDArray

SAMPLES = 64  # of an array: a microsecond each, and enough to see a share to a few per cent
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236}  # asm/unistd.h
_F_NODE_OF_ADDRESS = 1 | 2  # MPOL_F_NODE | MPOL_F_ADDR, linux/mempolicy.h


def sampled_nodes(array: NDArray[np.uint8], samples: int = SAMPLES) -> dict[int, int]:
    """How many of `samples` pages, spread evenly over `array` (uint8 [n], contiguous), lie on each node; touches those pages.

    Empty where the kernel does not tell: it was built for one node, or a container forbids the call.
    """
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None or not array.nbytes:
        return {}
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    nodes: Counter[int] = Counter()
    for sample in range(samples):
        address = array.ctypes.data + sample * array.nbytes // samples
        node = ctypes.c_int(-1)
        if call(
            ctypes.c_long(number), ctypes.byref(node), None, ctypes.c_ulong(0), ctypes.c_void_p(address),
            ctypes.c_ulong(_F_NODE_OF_ADDRESS),
        ):  # fmt: skip
            return {}
        nodes[node.value] += 1
    return dict(nodes)
