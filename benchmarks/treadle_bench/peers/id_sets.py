"""Row ids to ask for: uniform in each head's range, the worst case for every cache, never the same set twice in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument


@dataclass(frozen=True, slots=True)
class IdSets:
    """ids: [tokens, columns] int64, from which sets of any number of tokens are taken."""

    ids: NDArray[np.int64]

    @classmethod
    def uniform(cls, table_rows: int, columns: int, tokens: int, seed: int = 0) -> IdSets:
        """Ids of so many tokens. Column c of a token lies in the c-th of `columns` equal ranges of the table, which are its heads."""
        if table_rows < columns:
            raise InvalidArgument(f"a table of {table_rows} rows has no {columns} heads")
        head_rows = table_rows // columns
        local = np.random.default_rng(seed).integers(0, head_rows, size=(tokens, columns), dtype=np.int64)
        return cls(local + np.arange(columns, dtype=np.int64) * head_rows)

    def sets(self, tokens: int) -> int:
        """How many sets of so many tokens there are."""
        return len(self.ids) // tokens

    def rows(self, first: int, tokens: int) -> NDArray[np.int64]:
        """[tokens, columns] int64, a view."""
        return self.ids[first : first + tokens]
