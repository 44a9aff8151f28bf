"""What the worker asks of the process that runs the model, for a prefix that it has checked and holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference_worker.adapters.vllm_prefixes import VllmPrefixes
from treadle.contract.errors import DeadlineExceeded, ResourceExhausted

VERSION = "a" * 64
NAME = f"rules@{VERSION}"
MAPPED: Any = SimpleNamespace(dictionary=SimpleNamespace(name="rules"), version=VERSION, path=Path("/cache/aa/tensors"))


class Process:
    """The engine's: what it was asked and told, and the answers that it gives."""

    def __init__(self, *answers: str) -> None:
        self.heard: list[tuple[object, ...]] = []
        self._answers = list(answers)

    def ask(self, *asked: object) -> str:
        self.heard.append(asked)
        if not self._answers:
            raise DeadlineExceeded("silent")
        return self._answers.pop(0)

    def tell(self, *told: object) -> None:
        self.heard.append(told)


def test_a_prefix_of_this_hosts_store_is_opened_by_its_name_and_let_go() -> None:
    process: Any = Process(NAME)
    prefixes = VllmPrefixes(process)
    prefixes.open(MAPPED)
    prefixes.close(MAPPED)
    assert process.heard == [("open_treadle_prefix", NAME, True), ("close_treadle_prefix", NAME)]


@pytest.mark.parametrize("answer", ["Elsewhere: no such folder here", "Leaving: the store's folder is here, too, without it"])
def test_one_that_came_into_a_cache_is_opened_where_it_lies(answer: str) -> None:
    process: Any = Process(answer, NAME)
    VllmPrefixes(process).open(MAPPED)
    assert process.heard == [("open_treadle_prefix", NAME, True), ("open_treadle_prefix", "/cache/aa", True)]


def test_what_keeps_it_from_opening_is_told_and_an_answer_too_late_holds_nothing() -> None:
    full: Any = Process("ResourceExhausted: 3 prefixes are open")
    with pytest.raises(ResourceExhausted, match="3 prefixes are open"):
        VllmPrefixes(full).open(MAPPED)
    silent: Any = Process()
    with pytest.raises(DeadlineExceeded):
        VllmPrefixes(silent).open(MAPPED)
    assert silent.heard[-1] == ("close_treadle_prefix", NAME)
