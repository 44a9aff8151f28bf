"""Commands that other packages add, by the entry-point group `treadle.commands`.

Owns finding them without importing them, and a clear word when one cannot be loaded. Each is a typer app.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

import typer

from treadle.contract.errors import NotFound

GROUP = "treadle.commands"


@dataclass(frozen=True, slots=True)
class Known:
    """A command of one of our own packages. `summary`: as its app says it, for those who do not import the app."""

    package: str
    summary: str


KNOWN = {
    "pool": Known("treadle-engram-pool", "Load, list, verify, push, pull and remove tables of a pool."),
    "engram": Known("treadle-engram-pool", "Grow a memory for a model from your own text, and measure it."),
    "asm": Known("treadle-asm-store", "Build, publish and serve long prefixes as dictionaries."),
    "model": Known("treadle-inference-worker", "Language models on this machine."),
    "key": Known("treadle-inference-gateway", "Make keys for a gateway, and keep their digests in its key file."),
    "bench": Known("treadle-bench", "Measure this machine, and what a memory gains."),
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """A command of another package, not imported yet."""

    name: str
    entry: EntryPoint

    @property
    def package(self) -> str:
        """Name and version of the package."""
        dist = self.entry.dist
        return f"{dist.name} {dist.version}" if dist is not None else self.entry.module

    @property
    def summary(self) -> str:
        """What it does, for `treadle --help`; of a command that is not ours, what its package says of itself."""
        if self.name in KNOWN:  # a package has one summary and may bring several commands
            return KNOWN[self.name].summary
        dist = self.entry.dist
        return str(dist.metadata["Summary"]) if dist is not None and "Summary" in dist.metadata else ""

    def load(self) -> typer.Typer:
        """Import it. NotFound, naming package and reason, if that fails in any way."""
        try:
            app = self.entry.load()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise NotFound(f"the command `{self.name}` of {self.package} cannot be loaded: {reason}") from error
        if not isinstance(app, typer.Typer):
            raise NotFound(f"the command `{self.name}` of {self.package} is a {type(app).__name__}, not a typer app")
        return app


def plugins() -> dict[str, Plugin]:
    """Installed plugins by name, sorted; of two with one name the first found."""
    found: dict[str, Plugin] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, Plugin(entry.name, entry))
    return dict(sorted(found.items()))
