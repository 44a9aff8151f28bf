"""One open version of a long prefix: its dictionary of attention states, mapped, and the exact KV beside it where that is kept.

Owns what is told of it. Does not choose or open versions (`prefix_catalogue`, `prefix_opening`), look up or merge
(`treadle.nn.prefix_memory`), or decide which requests go to the exact KV (`prefix_run`).
"""

from __future__ import annotations

from inference_worker.domain.ports import MappedPrefix, PrefixHost
from inference_worker.domain.prefix_kv import PrefixKV
from treadle.contract.dictionary import Dictionary
from treadle.nn.prefix_memory import PrefixMemory, PrefixUse


class OpenPrefix:
    """One version, for the requests of one engine.

    mapped:    its files; its own, until whoever opened it closes it
    memory:    the dictionary, as the forward looks things up in it; None: another process looks up
    kv:        the exact KV; None: none is kept
    host:      the process that runs the model, which has it open too; None: this one
    fallbacks: requests that the guard sent to it since it was opened; written by whoever runs the steps
    """

    def __init__(
        self, mapped: MappedPrefix, memory: PrefixMemory | None, kv: PrefixKV | None, host: PrefixHost | None = None
    ) -> None:
        self._mapped, self.memory, self.kv, self._host = mapped, memory, kv, host
        self.model: Dictionary = mapped.dictionary
        self.version = mapped.version
        self.fallbacks = 0

    @property
    def tally(self) -> int:
        """See OpenMemory: fallbacks."""
        return self.fallbacks

    @property
    def tokens(self) -> int:
        """Tokens that it stands for."""
        return self.model.prefix.tokens

    @property
    def mapped_bytes(self) -> int:
        """Bytes of files that are mapped; the host has them once, for all processes."""
        return self.model.nbytes + (self.kv.nbytes if self.kv is not None else 0)

    @property
    def copied_bytes(self) -> int:
        """Bytes of it in this process's own memory."""
        return self.memory.copied_bytes if self.memory is not None else 0

    @property
    def positions_before(self) -> int:
        """Most positions before a request's own tokens, whether the dictionary answers it or the exact KV."""
        return self.tokens if self.kv is not None else self.model.position_offset

    @property
    def ref(self) -> str:
        """NAME@VERSION."""
        return f"{self.model.name}@{self.version}"

    def begin(self) -> PrefixUse:
        """A request's use of the dictionary. What fails in it is the request's own: others in its step know nothing of it."""
        assert self.memory is not None, "the process that runs the model begins uses of its own"
        return PrefixUse(self.memory, contained=True)

    def close(self) -> None:
        """Let go of the version. No step may be using it."""
        if self._host is not None:
            self._host.close(self._mapped)
        self._mapped.close()
