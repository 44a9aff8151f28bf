"""`treadle asm`: build dictionaries from long prefixes, publish them to a store, and look after what it keeps.

Owns words, tables and progress bars. The store is reached through the SDK; the builder, and torch with it, is imported when one of
its commands runs. Errors are TreadleError: the `treadle` command prints them and exits with 1.
"""

import typer

from asm_store.commands.build import build
from asm_store.commands.eval import evaluate
from asm_store.commands.publish import get, publish
from asm_store.commands.show import show
from asm_store.commands.versions import extend, list_dictionaries, pin, promote, remove, status, unpin

app = typer.Typer(no_args_is_help=True, help="Build, publish and serve long prefixes as dictionaries.")
app.command("build")(build)
app.command("show")(show)
app.command("eval")(evaluate)
app.command("publish")(publish)
app.command("ls")(list_dictionaries)
app.command("promote")(promote)
app.command("pin")(pin)
app.command("unpin")(unpin)
app.command("extend")(extend)
app.command("get")(get)
app.command("rm")(remove)
app.command("status")(status)
