"""What `build` and `eval` share: loading the builder when it is needed, the model, and a bar for long work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.contract.errors import NotFound

if TYPE_CHECKING:
    from asm_store.building.chat import Wrap

CORES = len(os.sched_getaffinity(0))

Threads = Annotated[int, typer.Option(min=1, help="Compute threads; default: all cores. Other threads, other last digits.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="Write prompts as the model's chat template does: as requests to /v1/chat/completions come.")
]


def load_builder(threads: int) -> None:
    """Set compute threads, then import torch. Raises NotFound where the extra is missing."""
    from treadle.chassis.threads import set_compute_threads

    try:
        if "torch" not in sys.modules:
            set_compute_threads(threads)
        import torch

        import treadle.nn  # noqa: F401  # whether it is there

        torch.set_num_threads(threads)
    except ImportError as error:
        raise NotFound("building needs torch and treadle-nn: pip install 'treadle-asm-store[builder]'") from error


def model_at(model: str) -> tuple[Path, str]:
    """Folder and name of a model, fetched first where it is a known name."""
    from treadle.nn.model_folder import find_model_folder

    return find_model_folder(model, lambda step, share: say(f"fetching the model: {step}") if 0 < share < 1 else None)


def wrap_for(model_folder: Path, chat: bool) -> Wrap | None:
    """How prompts are written; None: as they are."""
    from asm_store.building.chat import chat_wrap

    return chat_wrap(model_folder) if chat else None


def say(text: str) -> None:
    """A remark on standard error."""
    typer.echo(text, err=True)


@contextmanager
def working() -> Iterator[Callable[[str, int, int], None]]:
    """A bar: (what, done, of); where standard error is no terminal, a line whenever the work is another."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TimeRemainingColumn(),
    )  # fmt: skip
    shown = ""
    with rich.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)

        def watch(what: str, done: int, of: int) -> None:
            nonlocal shown
            if what != shown:
                bar.reset(task)
                if not console.is_terminal:
                    say(what)
            shown = what
            bar.update(task, description=what, completed=done, total=of)

        yield watch
