"""Makes the texts that ship beside the memory `kjv`: `python -m treadle_bench.grow.shipped_texts --texts DIR OUT`.

Owns which piece of which book each file is: what the memory is grown from, the chapters held out of it, and the mixed text. The
content is the same each time; the compressed bytes may differ between versions of liblzma.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Mapping
from pathlib import Path

from treadle.contract.errors import TreadleError
from treadle_bench.grow.domains import Split, read_text
from treadle_bench.grow.king_james import king_james
from treadle_bench.grow.other_texts import MIX_FILE, texts_folder

MIX_CHARACTERS = 426_500  # the limit; the text ends with the last whole line within it
FAILED = 1


def shipped_texts(texts: Path) -> Mapping[str, str]:
    """Text by file name, from the folder of books. Raises NotFound, InvalidArgument (a book that is not whole)."""
    bible = king_james(texts)
    mix = read_text(texts / MIX_FILE)[:MIX_CHARACTERS]
    return {
        "kjv.txt.xz": bible.text(Split.TRAIN),
        "kjv-held-out.txt.xz": bible.text(Split.HELD_PARTS),
        "mix.txt.xz": mix[: mix.rindex("\n") + 1],
    }


def write(texts: Path, out: Path) -> list[Path]:
    """Write every file into the folder `out`, which is made if need be; returns them."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in shipped_texts(texts).items():
        path = out / name
        path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
        written.append(path)
    return written


def main() -> int:
    """Write the files and say which."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, help="folder with the Project Gutenberg books")
    parser.add_argument("out", type=Path, help="folder for the files")
    arguments = parser.parse_args()
    try:
        for path in write(texts_folder(arguments.texts), arguments.out):
            print(f"{path}: {path.stat().st_size} bytes")
    except TreadleError as error:
        print(f"shipped texts: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
