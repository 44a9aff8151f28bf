"""The file of a prefix's exact KV: compared with its digest, and mapped."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from treadle.contract.errors import DataLoss, NotFound, Unavailable

TENSOR = "kv"


def map_prefix_kv(path: Path, digest: str) -> Tensor:
    """The tensor of a file whose sha256 is `digest`, a view of the mapping: its bytes are the page cache's, the same for all processes.

    Raises NotFound for a file that is not there (its version left while it was opened), DataLoss for one that is torn, or another one,
    Unavailable where the system fails, which says nothing about its bytes.
    """
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            raise DataLoss(f"prefix KV: the sha256 of {path.name} is not the manifest's")
        kv: Tensor = safe_open(str(path), framework="pt").get_tensor(TENSOR)  # type: ignore[no-untyped-call]  # safetensors types no get_tensor
    except FileNotFoundError as error:
        raise NotFound(f"prefix KV: {path.name} is gone") from error
    except SafetensorError as error:
        raise DataLoss(f"prefix KV: {path.name} cannot be read: {error}") from error
    except OSError as error:
        raise Unavailable(f"prefix KV: {path.name} cannot be read now: {error.strerror}; try again") from error
    return kv
