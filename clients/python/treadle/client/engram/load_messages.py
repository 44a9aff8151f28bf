"""A load in messages: what a pool is asked for, and its answers as they come in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram import pool_types as types
from treadle.client.engram.pool_types import model_ref
from treadle.contract import EngramModel, Unavailable
from treadle.engram.v1 import engram_pool_pb2 as pb

LOAD_SECONDS_MAX = 6 * 3600.0  # 200 GB from a slow disk; a load that hangs ends some day
ProgressCallback = Callable[[types.Progress], None]


def report(progress: ProgressCallback | None, message: pb.Progress) -> None:
    """Tell how far a long call is, where somebody listens."""
    if progress is not None:
        progress(types.Progress(message.bytes_done, message.bytes_total, message.step))


class LoadAnswers:
    """Answers of a load. Read them to their end: leaving early counts as cancelled."""

    def __init__(self, progress: ProgressCallback | None) -> None:
        self._progress = progress
        self._loaded: types.ResidentModel | None = None

    def add(self, answer: pb.LoadTableResponse) -> None:
        """Take one, in order."""
        if answer.WhichOneof("event") == "loaded":
            self._loaded = types.resident_model(answer.loaded)
        else:
            report(self._progress, answer.progress)

    def loaded(self) -> types.ResidentModel:
        """What was loaded. Raises Unavailable if the last answer was none."""
        if self._loaded is None:
            raise Unavailable("the pool ended the load without a result")
        return self._loaded


def load_request(model: EngramModel | None, token_map: NDArray[np.int32] | None, keep_previous: bool) -> pb.LoadTableRequest:
    """Write one, without its source."""
    return pb.LoadTableRequest(
        manifest_json=model.template.to_json() if model else b"",
        token_map=b"" if token_map is None else token_map.astype("<i4").tobytes(), keep_previous=keep_previous,
    )  # fmt: skip


def placed(request: pb.LoadTableRequest, share: types.OwnerShare | None) -> pb.LoadTableRequest:
    """The same request for an owner's rows only; unchanged for None."""
    if share is not None:
        spread = share.spread
        request.placement.CopyFrom(pb.Placement(
            owners=spread.owners, owner=share.owner, replicas=spread.replicas, stretch_rows=spread.stretch_rows,
        ))  # fmt: skip
    return request


def grown_request(path: Path, name: str | None, keep_previous: bool) -> pb.LoadTableRequest:
    """Write one."""
    return pb.LoadTableRequest(grown=pb.GrownSource(path=str(path), name=name or ""), keep_previous=keep_previous)


def store_request(store: str, protocol: str, model: str, version: str | None, keep_previous: bool) -> pb.LoadTableRequest:
    """Write one."""
    source = pb.StoreSource(master=store, protocol=protocol, ref=model_ref(model, version))
    return pb.LoadTableRequest(store=source, keep_previous=keep_previous)
