"""Manifests that were read: reading one takes milliseconds, and a list that is asked for again brings the same ones."""

from __future__ import annotations

import hashlib
from weakref import WeakValueDictionary

from treadle.contract.dictionary import Dictionary


class ReadManifests:
    """Found again by the sha256 of their text, for as long as somebody has them: it never holds more than its callers do. Any thread."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, Dictionary] = WeakValueDictionary()

    @property
    def count(self) -> int:
        """Manifests that somebody has."""
        return len(self._known)

    def read(self, text: bytes) -> tuple[Dictionary, str]:
        """What a manifest says, and its version. Raises InvalidArgument as `Dictionary.from_json`."""
        digest = hashlib.sha256(text).hexdigest()
        known = self._known.get(digest)
        if known is not None:
            return known, digest
        dictionary = Dictionary.from_json(text)
        version = dictionary.version
        if version == digest:  # another text may mean the same: it is read each time
            self._known[digest] = dictionary
        return dictionary, version
