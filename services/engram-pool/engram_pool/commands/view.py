"""`treadle pool export-view`: a table as the checkpoint files that stock vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from engram_pool.commands.calling import DEFAULT_POOL, Json, KeyFile, Name, Pool, TlsClient, TlsRoots, fabric_of, full_version


def export_view(
    name: Name, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    version: Annotated[str, typer.Option(help="Version, or its first digits; none: the current one.")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="A model folder that the view completes: its other files are linked.")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the rows where the file system cannot share blocks between files.")] = False,
    shards: Annotated[int, typer.Option(min=1, help="Tensors of a table: split_ngram_parts of the model; a checkpoint says so.")] = 512,
    prefix: Annotated[str, typer.Option(help="Of tensors' names up to the layer's number; a checkpoint says so.")] = "model.language_model.layers",
    pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, tls_root_file: TlsRoots = None, tls_client_file: TlsClient = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Give the rows of a Qwen PLE of this host's pool as the safetensors files that stock vLLM reads (docs/vllm.md)."""
    from treadle.client.engram.stock_view import export_view as export

    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric:
        opened = fabric.engram.describe(name, full_version(fabric, name, version))
        view = export(opened, folder, copy=copy, shards=shards, layers_prefix=prefix, checkpoint=checkpoint)
    tables = [str(path) for path in view.files if path.name.startswith("treadle-ple-")]
    if as_json:
        print(
            json.dumps(
                {"files": tables, "row_bytes": view.row_bytes_total, "shared": view.shared, "version": opened.resident.version}
            )
        )
        return
    how = "the pool's own blocks" if view.shared else "a copy"
    print(
        f"{len(tables)} tables of {name} {opened.resident.version[:12]}, {view.row_bytes_total} bytes of rows ({how}), in {folder}"
    )
