import os

import pytest

from treadle_bench.answers import Lines


def test_lines_come_one_by_one_though_they_were_written_together_or_in_pieces() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        lines = Lines(pipe)
        os.write(writing, b"attached\nwarm\nha")
        assert lines.within(1) == "attached"
        assert lines.within(1) == "warm"
        assert lines.within(0.01) is None
        os.write(writing, b"lf\n\n")
        assert lines.within(1) == "half"
        assert lines.within(1) == ""
        os.close(writing)
        with pytest.raises(EOFError):
            lines.within(1)
