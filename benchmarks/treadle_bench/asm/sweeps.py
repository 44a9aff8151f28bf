"""Settings of dictionaries side by side: keys, grouping, aggregation and dtype (paper, section 3.5 and 3.6), and chunks (its Table 3).

Owns the lists of variants. A sweep runs on validation questions: it is what settings are chosen by.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.contract.dictionary import Aggregation, ChunkMerge, DictionarySettings, Grouping, KeyMode, RowDtype
from treadle.nn.model import CausalLM
from treadle_bench.asm.methods import Kind, Method
from treadle_bench.asm.tasks import Task

ENTRIES, QUICK_ENTRIES = (256, 1024), (64,)
RIDGE_PPM = 10_000  # a hundredth of the mean variance
CHUNK_COUNTS = (2, 4, 8)


def settings_methods(task: Task, model: CausalLM, base: DictionarySettings, *, quick: bool) -> list[Method]:
    """The base, and what differs from it in one thing; joined heads and own codebooks also together."""
    group = model.config.heads // model.config.kv_heads
    changes: dict[str, dict[str, object]] = {
        "": {},
        "eq5" if base.aggregation is Aggregation.GEO else "geo": {
            "aggregation": Aggregation.EQ5 if base.aggregation is Aggregation.GEO else Aggregation.GEO
        },
        "white": {"ridge_ppm": 0 if base.whitened else RIDGE_PPM},
        "unified": {"key": KeyMode.ROPE_UNIFIED, "key_position": len(task.prefix)},
        "unified-white": {"key": KeyMode.ROPE_UNIFIED, "key_position": len(task.prefix), "ridge_ppm": RIDGE_PPM},
        "own-position": {"key": KeyMode.OWN_POSITION},
        "individual": {"grouping": Grouping.INDIVIDUAL},
        f"c{group}": {"heads_joined": group},
        f"c{group}-individual": {"heads_joined": group, "grouping": Grouping.INDIVIDUAL},
        "f32": {"dtype": RowDtype.F32},
    }
    found = [Method(Kind.FULL), Method(Kind.NONE)]
    for entries in QUICK_ENTRIES if quick else ENTRIES:
        for variant, change in changes.items():
            settings = replace(base, entries=entries, **change)  # type: ignore[arg-type]  # fields of several types
            found.append(Method(Kind.DICTIONARY, entries, settings, variant))
    return found


def chunk_methods(task: Task, model: CausalLM, base: DictionarySettings, *, quick: bool) -> list[Method]:
    """The prefix in 1, 2, 4 and 8 chunks, encoded alone at their true positions: full attention over them, and dictionaries whose Z is
    summed over chunks (what equation 3 calls exact) or averaged (what equation 5 does to states of one cluster)."""
    found, count = [Method(Kind.FULL), Method(Kind.NONE)], len(task.prefix)
    entries = QUICK_ENTRIES[0] if quick else ENTRIES[-1]
    found.append(Method(Kind.DICTIONARY, entries, replace(base, entries=entries)))
    for chunks in CHUNK_COUNTS[: 1 if quick else None]:
        tokens = -(-count // chunks)
        found.append(Method(Kind.CHUNKED, chunk_tokens=tokens))
        for merge in ChunkMerge:
            settings = replace(base, entries=entries, chunk_merge=merge)
            found.append(Method(Kind.DICTIONARY, entries, settings, f"{chunks}chunks-{merge}", tokens))
    return found


def list_methods(task: Task, model: CausalLM, base: DictionarySettings, *, quick: bool) -> list[Method]:
    """Two-level lookups: lists by how many of them are scanned (paper, Figure 4), and one-level beside them."""
    entries = QUICK_ENTRIES[0] if quick else ENTRIES[-1]
    found = [Method(Kind.FULL), Method(Kind.DICTIONARY, entries, replace(base, entries=entries))]
    for lists in (8,) if quick else (8, 16, 32, 64):
        for probed in (1, 4) if quick else (1, 2, 4, 8, 16):
            if probed <= lists:
                settings = replace(base, entries=entries, lists=lists)
                found.append(Method(Kind.DICTIONARY, entries, settings, f"lists{lists}-probed{probed}", lists_probed=probed))
    return found
