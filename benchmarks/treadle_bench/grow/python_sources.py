"""Python's standard library as a domain: modules are units, top-level packages are wholes.

Technical text that is on every machine which runs this: code with its comments and documentation, as it stands in the
files. It differs between Python versions, so the version and the domain's digest go with every figure. Owns which
modules are text worth learning (no tests, no data tables, no bundled tools), and which are held out.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path

from treadle.contract.errors import NotFound
from treadle_bench.grow.domains import Domain, Split, Unit, read_text, split_units

# Tests, bundled applications and what other people install; character tables; packages that newer versions dropped.
EXCLUDED = frozenset({
    "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "dist-packages", "__pycache__",
    "__phello__", "encodings", "pydoc_data", "distutils", "msilib", "lib-tk", "entities.py", "_pydecimal.py", "_pyrepl",
})  # fmt: skip
HELD_PACKAGES = ("concurrent", "json", "wsgiref", "xmlrpc")  # threads, a format, a protocol's server, a protocol's client
PARTS_CHARACTERS_MIN, PARTS_CHARACTERS_MAX = 4_000, 80_000  # a held-out module neither too short to measure nor all there is
PARTS_EVERY, HELD_AT, VALIDATION_AT = 15, 4, 14
TRAIN_CHARACTERS_MAX = 4_000_000  # about 1 M tokens, as much as the King James Bible has


def python_sources(folder: Path | None = None) -> Domain:
    """The domain "python" from `folder`, default this interpreter's standard library. Raises NotFound where it has no sources."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    units = modules(root)
    sized = {unit.name for unit in units if PARTS_CHARACTERS_MIN <= len(unit.text) <= PARTS_CHARACTERS_MAX}
    splits = split_units(
        [unit for unit in units if unit.name in sized or unit.whole in HELD_PACKAGES], held_wholes=HELD_PACKAGES,
        wholes_of_parts={unit.whole for unit in units} - set(HELD_PACKAGES), every=PARTS_EVERY, held_at=HELD_AT,
        validation_at=VALIDATION_AT,
    )  # fmt: skip
    kept = {unit.name for split, chosen in splits.items() if split is not Split.TRAIN for unit in chosen}
    splits[Split.TRAIN] = _up_to([unit for unit in units if unit.name not in kept], TRAIN_CHARACTERS_MAX)
    origin = {"source": "Python's standard library (PSF licence)", "python": platform.python_version()}
    return Domain("python", "modules", "packages", origin, splits)


def modules(root: Path) -> list[Unit]:
    """Every module of the library by path, headed by it. Files that are not UTF-8 are none. Raises NotFound if there are none."""
    units = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if EXCLUDED.intersection(place.parts) or place.name.startswith("_sysconfigdata") or place.parts[0].startswith("config-"):
            continue
        text = read_text(path).strip()
        if text:
            units.append(Unit(place.parts[0].removesuffix(".py"), place.as_posix(), f"# {place.as_posix()}\n{text}\n"))
    if not units:
        raise NotFound(f"{root}: no Python sources; this interpreter came without its standard library as files")
    return units


def _up_to(units: list[Unit], characters_max: int) -> tuple[Unit, ...]:
    """As many units as fit, chosen by their name's digest (an even sample), given back in their own order."""
    room, chosen = characters_max, set()
    for unit in sorted(units, key=lambda each: hashlib.sha256(each.name.encode()).digest()):
        if len(unit.text) <= room:
            room -= len(unit.text)
            chosen.add(unit.name)
    return tuple(unit for unit in units if unit.name in chosen)
