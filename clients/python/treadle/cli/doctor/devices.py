"""Memory and links beyond the plain host: DAX, CXL, RDMA, GPUs."""

from __future__ import annotations

from treadle.cli.doctor.finding import Finding, Host, Level


def dax(host: Host) -> Finding:
    """Memory devices that can be mapped."""
    devices = sorted({*host.names("/dev", "dax*"), *host.names("/sys/bus/dax/devices")})
    if not devices:
        return Finding("DAX", "none", "No memory device to map tables on; shared memory is used.", level=Level.INFO)
    modes = ", ".join(f"{device} {_bytes_text(host, device)}".strip() for device in devices)
    advice = (
        f"engram-pool --storage dax --dax-device /dev/{devices[0]} takes all of it for tables; or daxctl reconfigure-device "
        "--mode=system-ram makes it a NUMA node."
    )
    return Finding("DAX", modes, "2 MiB pages by nature; can be shared by hosts where CXL switches it.", advice, Level.INFO)


def cxl(host: Host) -> Finding:
    """CXL memory expanders."""
    memories = host.names("/sys/bus/cxl/devices", "mem*")
    if memories:
        advice = "cxl list -M, cxl create-region; then a DAX device or a NUMA node appears."
        return Finding("CXL", ", ".join(memories), "Memory for tables that one host's slots do not hold.", advice, Level.INFO)
    bus = "bus without memory devices" if host.path("/sys/bus/cxl").exists() else "none"
    return Finding("CXL", bus, "Tables live in the host's own memory.", level=Level.INFO)


def rdma(host: Host) -> Finding:
    """RDMA ports, with their state and rate."""
    ports = []
    for device in host.names("/sys/class/infiniband"):
        for port in host.names(f"/sys/class/infiniband/{device}/ports"):
            folder = f"/sys/class/infiniband/{device}/ports/{port}"
            ports.append(f"{device}/{port} {host.read(f'{folder}/state').partition(': ')[2]} {host.read(f'{folder}/rate')}".strip())
    if not ports:
        return Finding("RDMA", "none", "Other hosts' rows come over TCP.", level=Level.INFO)
    active = any("ACTIVE" in port for port in ports)
    means = "Rows can come from other hosts' memory." if active else "No port is active: other hosts' rows come over TCP."
    return Finding(
        "RDMA",
        "; ".join(ports),
        means,
        "" if active else "Connect it; ibstat shows why a port is down.",
        Level.OK if active else Level.WARN,
    )


def gpu(host: Host) -> Finding:
    """GPUs that a production engine would run on."""
    driver = host.read("/proc/driver/nvidia/version").partition("\n")[0]
    listed = host.program("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    cards = host.names("/proc/driver/nvidia/gpus")
    amd = host.names("/sys/class/kfd/kfd/topology/nodes") if host.path("/dev/kfd").exists() else []
    if listed:
        means = "For the vLLM engine. On one GPU node alone vLLM's own pinned-memory gather is faster than a pool."
        return Finding("GPU", "; ".join(listed.splitlines()), means, level=Level.INFO)
    if driver or cards:
        found = f"{len(cards)} NVIDIA card(s), but nvidia-smi does not answer"
        return Finding("GPU", found, "The driver is loaded and does not work.", "Run nvidia-smi and see what it says.", Level.WARN)
    if amd:
        return Finding(
            "GPU", f"AMD, {len(amd)} KFD nodes", "For the vLLM engine with ROCm; not tried with treadle.", level=Level.INFO
        )
    return Finding("GPU", "none", "The embedded engine runs on the CPU.", level=Level.INFO)


def _bytes_text(host: Host, device: str) -> str:
    size = host.read(f"/sys/bus/dax/devices/{device}/size")
    return f"({int(size) / 2**30:.0f} GiB)" if size.isdecimal() else ""
