"""CPU and NUMA: how fast rows are hashed and gathered."""

from __future__ import annotations

import platform
import re

from treadle.cli.doctor.finding import Finding, Host, Level, gib

FLAGS = {  # as /proc/cpuinfo spells them, x86-64 and aarch64
    "sse4_2": "sse4.2", "avx2": "avx2", "avx512f": "avx512", "clwb": "clwb", "crc32": "crc32", "asimd": "neon", "sve": "sve",
}  # fmt: skip


def cpu(host: Host) -> Finding:
    """Model, cores and the instructions that the kernels choose among."""
    text = host.read("/proc/cpuinfo")
    fields = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    known = [name for flag, name in FLAGS.items() if flag in flags]
    cores = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    model = fields.get("model name") or platform.machine()
    found = f"{model}, {cores} cores, {' '.join(known) or 'no known extensions'}{_quota(host)}"
    if not flags & {"sse4_2", "crc32"}:
        advice = "Verify and load take several times longer; any x86-64 of the last 15 years has SSE4.2."
        return Finding("CPU", found, "No CRC32C instruction: checksums use a table.", advice, Level.WARN)
    means = "Checksums in hardware. " + ("Hash and gather take the wide path." if "avx2" in flags else "Hash takes the plain path.")
    if cores < 2:
        return Finding(
            "CPU", found, means + " Prefetch and model share one core.", "Two cores let rows come while layers run.", Level.WARN
        )
    return Finding("CPU", found, means)


def numa(host: Host) -> Finding:
    """NUMA nodes, and those that are memory alone (CXL expanders look like that)."""
    nodes = host.names("/sys/devices/system/node", "node[0-9]*")
    far = [node for node in nodes if not host.read(f"/sys/devices/system/node/{node}/cpulist")]
    found = f"{len(nodes) or 1} node{'s' if len(nodes) > 1 else ''}"
    if far:
        sizes = ", ".join(f"{node} {gib(_node_bytes(host, node))}" for node in far)
        advice = (
            f"Tables there: engram-pool --numa node:{far[0][4:]}; or mount -t tmpfs -o huge=always,mpol=bind:{far[0][4:]} tmpfs DIR, "
            "then engram-pool --segment-dir DIR."
        )
        return Finding(
            "NUMA", f"{found}, {sizes} without CPUs", "Far memory (CXL or persistent) that can hold tables.", advice, Level.INFO
        )
    if len(nodes) > 1:
        advice = "Run pool and worker on one node: numactl --cpunodebind=0 --membind=0 treadle up."
        return Finding("NUMA", found, "Rows from the other node take about 1.5 times as long.", advice, Level.INFO)
    return Finding("NUMA", found, "All memory is equally near.")


def _quota(host: Host) -> str:
    """The CPU limit of a container, where one is set (cgroup v2)."""
    quota, _, period = host.read("/sys/fs/cgroup/cpu.max").partition(" ")
    return f" (limited to {int(quota) / int(period):.1f} by the container)" if quota.isdecimal() and period.isdecimal() else ""


def _node_bytes(host: Host, node: str) -> int:
    match = re.search(r"MemTotal:\s*(\d+) kB", host.read(f"/sys/devices/system/node/{node}/meminfo"))
    return int(match[1]) << 10 if match else 0
