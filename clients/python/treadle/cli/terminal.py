"""How the command prints: text for people, one JSON document for programs, progress on standard error.

Owns width, colour and spinner decisions. Where the output is no terminal, nothing but plain lines is written.
"""

from __future__ import annotations

import json
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from treadle.cli.events import Event, describe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

EXIT_INTERRUPTED = 130  # as a shell says of a program that SIGINT ended
MARKS = {"ready": "[green]✓[/]", "done": "[green]✓[/]", "stopped": "[green]✓[/]", "died": "[yellow]![/]", "killed": "[yellow]![/]"}


def stdout() -> Console:
    """Console for answers."""
    from rich.console import Console  # 30 ms that `--json` and scripts need not pay

    return Console(highlight=False)


def stderr() -> Console:
    """Console for progress and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def size_text(byte_count: int) -> str:
    """Bytes for people: one unit everywhere, so that two commands say the same of the same memory."""
    return f"{byte_count / 1e6:.1f} MB"


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    """A line that starts with `error:` on standard error; the message is printed as it is."""
    from rich.text import Text

    stderr().print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


class StepView:
    """Shows events as they come: a spinner with what is waited for on a terminal, one line for each end of a step elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or stderr()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> StepView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.rest()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event.kind in ("starting", "progress", "draining"):
            self._spin(event)
            return
        self.rest()
        from rich.text import Text

        self._console.print(Text.from_markup(MARKS[event.kind]).append(f" {describe(event)}", style="default"), soft_wrap=True)

    def rest(self) -> None:
        """Take the spinner away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _spin(self, event: Event) -> None:
        text = describe(event)
        if not self._console.is_terminal:
            if event.kind == "starting":  # a log shows what it was when nothing more comes
                self._console.print(f"… {text}", soft_wrap=True, markup=False)
            return
        from rich.markup import escape
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        if self._progress is None:
            columns = SpinnerColumn(), TextColumn("{task.description}", table_column=None), TimeElapsedColumn()
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("")
            self._progress.start()
        assert self._task is not None
        self._progress.update(self._task, description=escape(text[: self._console.width - 14]))
