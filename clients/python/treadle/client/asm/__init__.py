"""Dictionaries of attention states: published to a store, opened where they lie, followed and deleted.

`AsmStore` and `AsyncAsmStore` stand behind `Fabric(asm=…).asm`; `map_folder` opens one without a store; a `DictionaryCache` maps those of a
store on another host.
"""

from treadle.client.asm.async_store import AsyncAsmStore
from treadle.client.asm.cache import CacheObserver, DictionaryCache
from treadle.client.asm.manifests import ReadManifests
from treadle.client.asm.mapped import MappedDictionary, map_folder
from treadle.client.asm.records import (
    Deleted,
    DeletedFile,
    FoundStates,
    Pointer,
    Progress,
    Published,
    Ref,
    StoredDictionary,
    StoreStatus,
)
from treadle.client.asm.store import AsmStore

__all__ = [
    "AsmStore", "AsyncAsmStore", "CacheObserver", "Deleted", "DeletedFile", "DictionaryCache", "FoundStates", "MappedDictionary", "Pointer",
    "Progress", "Published", "ReadManifests", "Ref", "StoreStatus", "StoredDictionary", "map_folder",
]  # fmt: skip
