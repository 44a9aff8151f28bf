"""Has the process that runs the model map a long prefix that this one has checked and holds, before its first request, and lets it go."""

from __future__ import annotations

from inference_worker.adapters.vllm_process import VllmProcess, error_of_answer
from inference_worker.domain.ports import MappedPrefix
from treadle.client.asm.mapped import Elsewhere, Leaving
from treadle.contract.errors import DeadlineExceeded

# Leaving, too: of a store on another host, where this one has a data folder at the same path. Who opens with a cache takes both for it.
NOT_HERE = tuple(f"{kind.__name__}: " for kind in (Elsewhere, Leaving))


class VllmPrefixes:
    """A PrefixHost. Called from threads that may wait."""

    def __init__(self, process: VllmProcess) -> None:
        self._process = process

    def open(self, mapped: MappedPrefix) -> None:
        """See PrefixHost."""
        name = _name(mapped)
        try:
            answer = self._process.ask("open_treadle_prefix", name, True)  # files, numbers and model were looked at here
            if answer.startswith(NOT_HERE):  # its files have come into a cache, whose lock is held here
                answer = self._process.ask("open_treadle_prefix", str(mapped.path.parent.absolute()), True)
        except DeadlineExceeded:
            self._process.tell("close_treadle_prefix", name)  # it may open it yet, for nobody
            raise
        if answer != name:
            raise error_of_answer(answer)

    def close(self, mapped: MappedPrefix) -> None:
        """See PrefixHost."""
        self._process.tell("close_treadle_prefix", _name(mapped))


def _name(mapped: MappedPrefix) -> str:
    return f"{mapped.dictionary.name}@{mapped.version}"
