"""`treadle pool owners`, `reserve` and `status`: the pool itself and the fabric around it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from engram_pool.commands.calling import DEFAULT_POOL, Json, KeyFile, Pool, TlsClient, TlsRoots, Version, fabric_of, full_version
from engram_pool.terminal import bytes_of, owner_document, owner_line, print_json, print_line, print_table, size_text, tenant_line


def list_owners(
    name: Annotated[str, typer.Argument(help="Tell only what they hold of this model; none: of all.")] = "",
    version: Version = "",
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """List the owners of the fabric with their health, as this pool knows them. The exit code is 1 where one cannot be reached."""
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric:
        full = full_version(fabric, name, version) if name else ""
        listed = fabric.engram.owners(name, full)
    if as_json:
        print_json({"stale": listed.stale, "owners": [owner_document(owner) for owner in listed.owners]})
    else:
        columns = ("owner", "address", "doors", "state", "versions", "rows held")
        print_table(columns, [owner_line(owner) for owner in listed.owners], empty="this pool has told nothing of itself yet")
        if listed.stale:
            print_line("the directory does not answer: this is the last list known")
    if listed.stale or not all(owner.reachable for owner in listed.owners):
        raise typer.Exit(1)


def reserve(
    name: Annotated[str, typer.Argument(help="Who asks; the same name again replaces the reserve.")],
    rate: Annotated[str, typer.Argument(help="Bandwidth to keep free: bytes a second, or with K, M, G; 0 gives it back.")],
    seconds: Annotated[float, typer.Option(help="How long; renew before it ends.")] = 60.0,
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Keep bandwidth of the pool's memory free for other traffic, such as KV blocks; rows yield to it."""
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric:
        now = fabric.engram.reserve_bandwidth(name, bytes_of(rate), seconds)
    if as_json:
        print_json({"reserved_bytes_per_second": now.reserved_bytes_per_second, "left_bytes_per_second": now.left_bytes_per_second})
        return
    print_line(
        f"reserved {size_text(now.reserved_bytes_per_second)}/s for {seconds:g} s, "
        f"{size_text(now.left_bytes_per_second)}/s are left to rows"
    )


def status(
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Show build, memory and page size of the pool."""
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric:
        now = fabric.engram.status()
    figures = {
        "address": pool, "pid": now.pid, "build_version": now.build_version, "proto_version": now.proto_version,
        "segment_dir": str(now.segment_dir), "table_bytes": now.table_bytes, "table_bytes_max": now.table_bytes_max,
        "page_bytes": now.page_bytes, "draining": now.draining, "scrub_chunks_checked": now.scrub.chunks_checked,
        "scrub_chunks_bad": now.scrub.chunks_bad, "scrub_chunks_repaired": now.scrub.chunks_repaired,
        "scrub_pass_ended_at_seconds": now.scrub.pass_ended_at_seconds,
    }  # fmt: skip
    if as_json:
        print_json(figures | {"tenants": [asdict(tenant) for tenant in now.tenants]})
    else:
        print_table(("", ""), [(name.replace("_", " "), str(value)) for name, value in figures.items()], empty="")
        columns = ("tenant", "rows", "refused", "late", "rows/s at most")
        print_table(columns, [tenant_line(tenant) for tenant in now.tenants], empty="")
    if now.draining:
        raise typer.Exit(1)
