"""Row ids to ask for: uniform in each head's range, the worst case for every cache, never the same set twice in a row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument


class IdSets:
    """Ids of `tokens_kept` tokens, made beforehand. Column c of a token lies in the c-th of `columns` equal ranges of the table."""

    def __init__(self, table_rows: int, columns: int, tokens_kept: int, seed: int = 0) -> None:
        if table_rows < columns:
            raise InvalidArgument(f"a table of {table_rows} rows has no {columns} heads")
        self.head_rows = table_rows // columns
        chance = np.random.default_rng(seed)
        local = chance.integers(0, self.head_rows, size=(tokens_kept, columns), dtype=np.int64)
        self.ids: NDArray[np.int64] = local + np.arange(columns, dtype=np.int64) * self.head_rows

    def first_token(self, number: int, tokens: int) -> int:
        """Where the set with that number begins; sets follow each other and begin anew when all ids were used."""
        return number % (len(self.ids) // tokens) * tokens

    def rows(self, first: int, tokens: int) -> NDArray[np.int64]:
        """[tokens, columns] int64, a view."""
        return self.ids[first : first + tokens]
