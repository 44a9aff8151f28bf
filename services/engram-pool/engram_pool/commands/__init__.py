"""`treadle pool`: load, list, promote, verify, remove, push, pull and export tables of a running pool.

Owns words, tables and progress bars; the work is the pool's, reached through the SDK. Errors are TreadleError: the `treadle`
command prints them and exits with 1.
"""

import typer

from engram_pool.commands.condition import list_owners, reserve, status
from engram_pool.commands.loading import load
from engram_pool.commands.stores import pull, push
from engram_pool.commands.versions import list_models, promote, remove, rollback, verify
from engram_pool.commands.view import export_view

app = typer.Typer(no_args_is_help=True, help="Load, list, verify, push, pull and remove tables of a pool.")
app.command("load")(load)
app.command("promote")(promote)
app.command("rollback")(rollback)
app.command("ls")(list_models)
app.command("verify")(verify)
app.command("rm")(remove)
app.command("owners")(list_owners)
app.command("push")(push)
app.command("pull")(pull)
app.command("export-view")(export_view)
app.command("reserve")(reserve)
app.command("status")(status)
