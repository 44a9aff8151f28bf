"""Memory: room for tables, and the pages that they can have. TLB misses are what a gather spends its time on."""

from __future__ import annotations

import re
import resource

from treadle.cli.doctor.finding import Finding, Host, Level, gib

DEMO_BYTES = 1 << 30  # model, worker and demo tables with room to spare
SHM_DEMO_BYTES = 256 << 20  # two tables of 102 MB
MEMLOCK_BYTES = 64 << 20
NOFILE = 4096
THP = "/sys/kernel/mm/transparent_hugepage"
HUGE_OPTIONS = ("huge=always", "huge=within_size", "huge=advise")  # advise: the pool asks for them
MOUNT_ADVICE = "As root: mount -t tmpfs -o huge=always,size=SIZE tmpfs DIR, then engram-pool --segment-dir DIR."


def memory(host: Host) -> Finding:
    """RAM in all, available, and the limit of a container."""
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)}
    available, limit = sizes.get("MemAvailable", 0), host.read("/sys/fs/cgroup/memory.max")
    found = f"{gib(sizes.get('MemTotal', 0))}, {gib(available)} available"
    if limit.isdecimal():
        found += f", container limit {gib(int(limit))} (tables in shared memory count)"
    if available < DEMO_BYTES:
        return Finding("Memory", found, "Too little for the model and the demo tables.", f"Free {gib(DEMO_BYTES)}.", Level.WARN)
    return Finding("Memory", found, "One copy of each table on this host, whoever reads it.")


def huge_anonymous(host: Host) -> Finding:
    """Transparent huge pages of private memory."""
    mode = _chosen(host.read(f"{THP}/enabled"))
    name = "Huge pages, private"
    if mode in ("always", "madvise"):
        return Finding(name, mode, "The `local` transport gets 2 MiB pages for its private copies.")
    advice = f"As root: echo madvise > {THP}/enabled."
    return Finding(
        name,
        mode or "not supported",
        "Private copies stay on 4 KiB pages: a gather takes about 1.5 times as long.",
        advice,
        Level.WARN,
    )


def huge_shared(host: Host) -> Finding:
    """Huge pages of /dev/shm: its own mount option decides, unless shmem_enabled forces or denies them to all."""
    mode, option = _chosen(host.read(f"{THP}/shmem_enabled")), _huge_option(host, "/dev/shm")
    name, found = "Huge pages, shared", f"/dev/shm {option or 'without huge='}"
    if mode == "deny":
        means = "No tmpfs gets 2 MiB pages, not even with huge=always."
        return Finding(name, "shmem_enabled=deny", means, f"As root: echo never > {THP}/shmem_enabled.", Level.WARN)
    if mode == "force" or option in HUGE_OPTIONS:
        found = f"{found}, shmem_enabled=force" if mode == "force" else found
        return Finding(name, found, "Tables can get 2 MiB pages there; `treadle status` shows what they got.")
    means = "Tables stay on 4 KiB pages: a gather takes about 1.5 times as long as on 2 MiB pages."
    return Finding(name, found, means, "As root: mount -o remount,huge=always /dev/shm.", Level.INFO)


def huge_mounts(host: Host) -> Finding:
    """File systems beside /dev/shm that give tables huge pages."""
    named = [
        f"{point} ({option})" for point, kind, option in _mounts(host)
        if point != "/dev/shm" and kind == "tmpfs" and option in HUGE_OPTIONS
    ]  # fmt: skip
    if named:
        return Finding("Huge-page mounts", ", ".join(named), "engram-pool --segment-dir there keeps tables on huge pages.")
    return Finding("Huge-page mounts", "none", "Shared tables get what /dev/shm gives.", MOUNT_ADVICE, Level.INFO)


def hugetlb(host: Host) -> Finding:
    """Reserved huge pages."""
    folder, found = "/sys/kernel/mm/hugepages", []
    for size in host.names(folder, "hugepages-*kB"):
        count, free = (host.read(f"{folder}/{size}/{name}_hugepages") for name in ("nr", "free"))
        if count.isdecimal() and int(count):
            found.append(f"{int(size[10:-2]) >> 10} MiB: {count}, {free} free")
    name = "Reserved huge pages"
    if not found:
        return Finding(name, "none", "Not needed: tmpfs with huge=always takes huge pages from free memory.")
    points = [point for point, kind, _ in _mounts(host) if kind == "hugetlbfs"]
    text = "; ".join(found) + (f"; hugetlbfs at {', '.join(points)}" if points else "")
    means = "Set aside, so tables cannot use them: a pool keeps small files beside its tables, which hugetlbfs does not hold."
    advice = "As root, if nothing else needs them: sysctl vm.nr_hugepages=0, and use tmpfs with huge=always."
    return Finding(name, text, means, advice, Level.INFO)


def shared_memory(host: Host) -> Finding:
    """/dev/shm, where `treadle up` keeps tables."""
    room = host.free_bytes("/dev/shm")
    if room is None:
        return Finding("/dev/shm", "not there", "`treadle up` has no place for tables.", "Mount a tmpfs at /dev/shm.", Level.WARN)
    found = f"{gib(room[0])}, {gib(room[1])} free"
    if room[1] < SHM_DEMO_BYTES:
        advice = f"As root: mount -o remount,size={gib(4 * SHM_DEMO_BYTES)[:1]}G /dev/shm (Docker: --shm-size)."
        return Finding("/dev/shm", found, f"The demo tables need {gib(SHM_DEMO_BYTES)}.", advice, Level.WARN)
    return Finding("/dev/shm", found, "Largest set of tables that `treadle up` can hold here.")


def limits(host: Host) -> Finding:
    """What this user may lock and open."""
    memlock, nofile = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lock = "unlimited" if memlock == resource.RLIM_INFINITY else gib(memlock)
    found = f"memlock {lock}, nofile {nofile}"
    if nofile < NOFILE:
        return Finding("Limits", found, "Many open streams need many files.", f"ulimit -n {NOFILE}", Level.WARN)
    if 0 <= memlock < MEMLOCK_BYTES:
        means = "Enough for this machine alone; RDMA registers memory and needs to lock it."
        return Finding("Limits", found, means, "For RDMA: ulimit -l unlimited.", Level.INFO)
    return Finding("Limits", found, "Enough.")


def _chosen(text: str) -> str:
    """The word in brackets."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def _mounts(host: Host) -> list[tuple[str, str, str]]:
    """(mount point, file system, its huge= option) of all mounts."""
    lines = [line.split() for line in host.read("/proc/mounts").splitlines()]
    return [
        (fields[1], fields[2], next((option for option in fields[3].split(",") if option.startswith("huge=")), ""))
        for fields in lines if len(fields) > 3
    ]  # fmt: skip


def _huge_option(host: Host, point: str) -> str:
    """The huge= option of what is mounted at `point`; the last mount is the one that is seen."""
    return next((option for mounted, _, option in reversed(_mounts(host)) if mounted == point), "")
