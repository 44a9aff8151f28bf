"""The `treadle` command: its own commands, those that packages add, and what an error looks like.

Nothing heavy is imported here or by what is imported here: `treadle --help` has to be there at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import typer

from treadle.cli import chat, demo, logs, status, up, version
from treadle.cli.doctor import command as doctor
from treadle.cli.fabric import POOL, STORE
from treadle.cli.plan import command as plan
from treadle.cli.plugins import KNOWN, Plugin, plugins
from treadle.cli.run_folder import RunFolder, home
from treadle.cli.terminal import print_error
from treadle.contract.errors import NotFound, TreadleError

# What the commands of services take as the address of theirs: command -> (service, environment variable).
ADDRESSES = {"pool": (POOL, "TREADLE_POOL"), "asm": (STORE, "TREADLE_ASM_STORE")}
OWN: dict[str, Callable[..., None]] = {
    "up": up.up, "down": up.down, "status": status.status, "logs": logs.logs, "chat": chat.chat, "demo": demo.demo,
    "doctor": doctor.doctor, "plan": plan.plan, "version": version.version,
}  # fmt: skip


def build_app(wanted: str | None, found: Mapping[str, Plugin]) -> typer.Typer:
    """The app for a command line whose first word is `wanted`: only that plugin is imported, the others are names with a summary.

    Raises NotFound if `wanted` is a plugin that cannot be loaded, or one of ours that is not installed.
    """
    app = typer.Typer(
        name="treadle", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
        help="A memory fabric for LLM inference: pool, store, worker and gateway on this machine, and what they know.",
    )  # fmt: skip
    for name, function in OWN.items():
        app.command(name)(function)
    for name, plugin in found.items():
        if name == wanted:
            app.add_typer(plugin.load(), name=name)
        elif name not in OWN:
            app.command(name, help=plugin.summary)(_not_called)
    if wanted in KNOWN and wanted not in found:
        raise NotFound(f"`treadle {wanted}` comes with the package {KNOWN[wanted].package}: pip install 'treadle[fabric]'")
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Errors that are meant for people are one line and exit code 1; wrong usage is 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    wanted = next((arg for arg in args if not arg.startswith("-")), None)
    try:
        if wanted in ADDRESSES:
            _point_at_fabric(*ADDRESSES[wanted])
        build_app(wanted, plugins())(args=args, prog_name="treadle")
    except TreadleError as error:
        print_error(str(error))
        sys.exit(1)


def _point_at_fabric(service: str, variable: str) -> None:
    """Let a service's commands find that of this machine's `treadle up`, unless somebody names another."""
    state = RunFolder(home()).read()
    record = state.service(service) if state is not None else None
    if record is not None and record.listen:
        os.environ.setdefault(variable, record.listen)


def _not_called() -> None:
    """Stands for a plugin in the help of the whole command."""
    raise NotFound("call it as the first word: treadle COMMAND …")
