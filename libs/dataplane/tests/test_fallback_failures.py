import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import Deadline
from treadle.dataplane import DeadlineQueue, fallback
from treadle.dataplane.faults import NativeFailure
from treadle.kernels import gather_rows

TABLE = np.arange(64 * 40, dtype=np.uint8).reshape(40, 64)


def test_a_piece_that_fails_ends_its_ticket_short_and_the_thread_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(40, dtype=np.int64)

    def out_of_memory_at_20(table: NDArray[np.uint8], ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        if ids[0] == 20:
            raise MemoryError("no room for a mask")
        gather_rows(table, ids, out)

    monkeypatch.setattr(fallback, "gather_rows", out_of_memory_at_20)
    with DeadlineQueue(workers=1, piece_rows=10, implementation="python") as queue:
        out = np.zeros((40, 64), dtype=np.uint8)
        ticket = queue.submit_gather(TABLE, rows, out, Deadline.after(1))
        with pytest.raises(NativeFailure, match="gather"):
            ticket.wait(10)
        assert ticket.done
        assert ticket.cancel().tolist() == [True] * 20 + [False] * 20
        assert np.array_equal(out[:20], TABLE[:20])
        monkeypatch.setattr(fallback, "gather_rows", gather_rows)
        again = queue.submit_gather(TABLE, rows, out, Deadline.after(1))
        assert again.wait(10)
        assert np.array_equal(out, TABLE)
