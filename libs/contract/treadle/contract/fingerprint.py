"""What a piece of memory depends on, field by field, so that a refusal can name the field."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treadle.contract.errors import FingerprintMismatch, InvalidArgument
from treadle.contract.version import canonical_json


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Sorted (field, value) pairs, e.g. family, row_bytes, token_map, tokenizer. Values are strings on the wire."""

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Fingerprint:
        """Make one from a mapping; None values are left out. Raises InvalidArgument for an empty name."""
        if any(not name for name in fields):
            raise InvalidArgument("a fingerprint field has an empty name")
        return cls(tuple(sorted((name, str(value)) for name, value in fields.items() if value is not None)))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.fields)

    def as_dict(self) -> dict[str, str]:
        """The fields as a new dictionary."""
        return dict(self.fields)

    @property
    def digest(self) -> bytes:
        """sha256 of the fields, 32 bytes: what stands for them in frames."""
        return hashlib.sha256(canonical_json(self.as_dict())).digest()

    def require(self, expected: Mapping[str, str]) -> None:
        """Check that every field of `expected` is here with that value.

        Raises FingerprintMismatch naming the first field (in alphabetical order) that is absent or differs.
        """
        mine = self.as_dict()
        for field in sorted(expected):
            if mine.get(field) != expected[field]:
                raise FingerprintMismatch(field, expected[field], mine.get(field))
