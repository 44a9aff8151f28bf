"""`python -m treadle.cli`: the same as the `treadle` script."""

from __future__ import annotations

from treadle.cli.main import main

if __name__ == "__main__":
    main()
