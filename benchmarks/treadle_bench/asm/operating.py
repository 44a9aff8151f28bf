"""A dictionary in use: which requests the guard sends back to the exact prefix, and how long mapping takes.

Owns the questions of other kinds and the file that is mapped. Swaps under load are a scenario of `loadtests`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from asm_store.building.recipe import matched_keys_of
from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_file import DTYPES, TENSORS_FILE, map_tensors, read_manifest, tensor_info, write_folder
from treadle.contract.errors import NotFound
from treadle.nn.matched_keys import MATCHED_PARTS
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import PrefixMemory, PrefixUse
from treadle_bench.asm.answering import Before, label_log_probs
from treadle_bench.asm.dictionaries import Builder
from treadle_bench.asm.options import settings_of
from treadle_bench.asm.tasks import SIZES, Task, Tokens, encode, load_task, load_tokenizer
from treadle_bench.report import Goal, Row

ENTRIES, QUICK_ENTRIES = 1024, 64
OFF_TASK_QUESTIONS, QUICK_QUESTIONS = 100, 10  # of each kind
OFF_TASK_TOKENS_MAX = 48
MAPPED_BYTES = 100_000_000
MAP_ROUNDS = 20
LISTS = ("list_keys", "list_starts")  # left out
FIXED = ("cosine_quantiles", "whitening", *MATCHED_PARTS)  # do not grow with the entries
PASSAGE_CHARACTERS = (120, 1200)
PASSAGES_PASSED = 50  # of a book: what stands before it begins


def measure(data: Path, model_folder: Path, changes: Sequence[str], *, quick: bool) -> tuple[list[Row], list[Goal]]:
    """The guard on clinc20, and the mapping. Raises NotFound where no other texts are in `data`."""
    tokenizer, model = load_tokenizer(model_folder), CausalLM.load(model_folder)
    sizes = SIZES["clinc20"].quick() if quick else SIZES["clinc20"]
    task = load_task("clinc20", 0, data, tokenizer, sizes=sizes)
    settings = replace(settings_of(changes), entries=QUICK_ENTRIES if quick else ENTRIES)
    settings = replace(settings, matched_keys=settings.matched_keys or matched_keys_of(len(task.prefix)))
    with tempfile.TemporaryDirectory(prefix="treadle-bench-asm-") as work:
        built = Builder(model, model_folder, task, Path(work)).build(settings)
    memory = PrefixMemory(built.dictionary, built.tensors)
    others = off_task(data, tokenizer, QUICK_QUESTIONS if quick else OFF_TASK_QUESTIONS)
    rows, goals = _guard(model, task, Before(memory.position_offset, memory=memory), others)
    times, size = _mapping(built.dictionary, MAPPED_BYTES // 10 if quick else MAPPED_BYTES)
    median = float(np.median(times))
    rows.append(Row("map a dictionary", {"bytes": size}, "ms", median, float(np.percentile(times, 99)), len(times)))
    goals.append(Goal(f"mapping {size / 1e6:.0f} MB, ms, median", median, 50.0))
    return rows, goals


def off_task(data: Path, tokenizer: Tokenizer, count: int) -> dict[str, list[Tokens]]:
    """Texts that nobody would send to a classifier of intents: questions of MT-bench, passages of books. By kind."""
    found: dict[str, list[Tokens]] = {}
    for path in sorted((data / "mt_bench").glob("*.jsonl")):
        questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        turns = [str(each["turns"][0]) for each in questions if each.get("turns")]
        if turns:
            found["MT-bench questions"] = [encode(tokenizer, text)[:OFF_TASK_TOKENS_MAX] for text in turns[:count]]
    books = [passages for path in sorted((data / "gutenberg").glob("*.txt")) if (passages := _passages(path))]
    if books:
        passages = [one for book in books for one in book[: -(-count // len(books))]]
        found["passages of books"] = [encode(tokenizer, text)[:OFF_TASK_TOKENS_MAX] for text in passages[:count]]
    if not found:
        raise NotFound(f"{data}: neither mt_bench nor gutenberg is there, so nothing is off the task")
    return found


def _guard(model: CausalLM, task: Task, before: Before, others: dict[str, list[Tokens]]) -> tuple[list[Row], list[Goal]]:
    asked = {"in task": list(task.questions), "clinc150's out-of-scope, no prompt form": list(task.unrelated)} | others
    rows, sent_back = [], dict[str, float]()
    for kind, questions in asked.items():
        uses = list[PrefixUse]()
        label_log_probs(model, questions, task.labels, before, uses)
        outside = [100 * use.lookups_outside / use.lookups for use in uses]
        sent_back[kind] = 100 * float(np.mean([use.off_task() for use in uses]))
        rows.append(
            Row(f"lookups outside: {kind}", {}, "%", float(np.median(outside)), float(np.percentile(outside, 99)), len(outside))
        )
        rows.append(Row(f"sent back: {kind}", {}, "%", sent_back[kind], sent_back[kind], len(uses)))
    goals = [Goal("in-task requests sent back, %", sent_back["in task"], 5.0)]
    goals += [Goal(f"sent back, {kind}, %", sent_back[kind], 95.0, at_least=True) for kind in others]
    return rows, goals


def _mapping(made: Dictionary, size: int) -> tuple[list[float], int]:
    """Milliseconds from a folder's path to a memory that answers, and its bytes. The file is in the page cache, as on a host that serves it."""
    dictionary, tensors = _grown(made, size)
    milliseconds = []
    with tempfile.TemporaryDirectory(prefix="treadle-bench-map-") as folder:
        write_folder(Path(folder), dictionary, tensors)
        for _ in range(MAP_ROUNDS):
            begun = time.perf_counter()
            manifest = read_manifest(Path(folder))
            PrefixMemory(manifest, map_tensors(Path(folder) / TENSORS_FILE, manifest))
            milliseconds.append(1e3 * (time.perf_counter() - begun))
    return milliseconds, dictionary.nbytes


def _grown(made: Dictionary, size: int) -> tuple[Dictionary, dict[str, NDArray[Any]]]:
    """A dictionary of the same shape with as many entries, of drawn numbers, as make `size` bytes or a little more."""
    of_entries = sum(info.nbytes for name, info in made.tensors if _part(name) not in (*LISTS, *FIXED))
    fixed = sum(info.nbytes for name, info in made.tensors if _part(name) in FIXED)
    entries = -(-made.settings.entries * (size - fixed) // of_entries)
    settings = replace(made.settings, entries=entries, lists=0)
    books = made.codebooks
    draw, tensors, infos = np.random.default_rng(0), dict[str, NDArray[Any]](), []
    for name, info in made.tensors:
        if _part(name) in LISTS:
            continue
        shape = info.shape if _part(name) in FIXED else (books, entries, *info.shape[2:])
        tensors[name] = draw.integers(0, 100, shape).astype(DTYPES[info.dtype])
        infos.append((name, tensor_info(tensors[name], info.dtype)))
    return replace(made, settings=settings, tensors=tuple(infos)), tensors


def _part(name: str) -> str:
    """A tensor's name without its layer's."""
    return name.rsplit(".", 1)[1]


def _passages(book: Path) -> list[str]:
    paragraphs = book.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").split("\n\n")
    return [part for part in paragraphs if PASSAGE_CHARACTERS[0] <= len(part) <= PASSAGE_CHARACTERS[1]][PASSAGES_PASSED:]
