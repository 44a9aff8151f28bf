"""The options of `treadle asm build`, each with its help and limits. What they mean together, `build` says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle.contract import dictionary

SELF_TRACES = 200

Name = Annotated[str, typer.Option(help="Name of the dictionary; requests choose it by this.", show_default=False)]
Prefix = Annotated[
    list[Path], typer.Option(help="Text file of the prefix, UTF-8; several are joined in their order.", show_default=False)
]
Traces = Annotated[
    Path | None,
    typer.Option(help='What requests are like: JSON lines {"text"} or {"prompt", "answer"}, or plain lines.', show_default=False),
]
SelfTraces = Annotated[
    int | None,
    typer.Option(min=1, help=f"Let the model write so many traces itself; without --traces {SELF_TRACES}.", show_default=False),
]
Model = Annotated[str, typer.Option(help="A model folder (Hugging Face layout), or a name to fetch.")]
Out = Annotated[Path | None, typer.Option(help="Folder to write; default: the name, here.")]
Entries = Annotated[int, typer.Option(min=1, help="K, entries of each codebook.")]
Key = Annotated[dictionary.KeyMode, typer.Option(help="What of a query is looked up by.")]
KeyPosition = Annotated[int, typer.Option(min=0, help="Position of all keys, for rope-unified.")]
Whiten = Annotated[bool, typer.Option("--whiten", help="Whiten query heads before they are joined.")]
HeadsJoined = Annotated[int, typer.Option(min=1, help="c, query heads of a group in one key; divides the group.")]
Grouping = Annotated[dictionary.Grouping, typer.Option(help="A codebook for each key/value head, or one for all of a layer.")]
Aggregation = Annotated[dictionary.Aggregation, typer.Option(help="How states of a cluster become one.")]
ChunkTokens = Annotated[int, typer.Option(min=0, help="Read the prefix in chunks of so many tokens, each by itself; 0: at once.")]
ChunkMerge = Annotated[dictionary.ChunkMerge, typer.Option(help="How states over chunks become one.")]
Positions = Annotated[dictionary.Positions, typer.Option(help="Where tokens of requests stand.")]
Dtype = Annotated[dictionary.RowDtype, typer.Option(help="Keys and states at rest.")]
Lists = Annotated[
    int,
    typer.Option(
        min=0, help="Lists of a two-level lookup; 0: all entries are scanned. From 4,096 entries on, about their square root."
    ),
]
Layers = Annotated[str, typer.Option(help="0-based decoder layers that get a dictionary, such as 0,4,8; default: all.")]
MatchedKeys = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="The prefix's own keys, of each head, that every query attends to, fitted to stand for all; 0: none, and chunks can be "
        "added later. Default: a quarter of the prefix, at most 256.",
        show_default=False,
    ),
]
Iterations = Annotated[int, typer.Option(min=0, help="Of the clustering.")]
Seed = Annotated[int, typer.Option(min=0, help="Of clustering and of the model's own traces.")]
KeepPrefixKV = Annotated[
    bool, typer.Option("--keep-prefix-kv", help="Keep the exact prefix KV beside it, for requests that are off its task.")
]
ExtendFrom = Annotated[
    Path | None,
    typer.Option(help="Folder of a dictionary: build a further chunk for its keys, with its settings.", show_default=False),
]
Source = Annotated[str, typer.Option(help="Where the prefix comes from and its licence, for the card.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin again where an interrupted build left off.")]
