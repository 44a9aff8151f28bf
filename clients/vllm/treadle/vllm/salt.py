"""Salts of vLLM's prefix cache: what keeps KV apart that depends on more than its tokens."""

from __future__ import annotations

from treadle.contract.version import canonical_json


def memory_identity(name: str, version: str, fusion: str) -> str:
    """What KV made with a memory depends on. fusion: the engine's setting (auto, on, shadow)."""
    return canonical_json({"engram": name, "engram_version": version, "engram_fusion": fusion}).decode()


def prefix_identity(prefix: str, *, exact: bool) -> str:
    """What KV made behind a long prefix depends on. prefix: NAME@VERSION; exact: behind its exact KV, not its dictionary"""
    return canonical_json({"prefix": prefix, "prefix_exact": exact}).decode()


def cache_salt(tenant: str, identity: str | None) -> str:
    """The `cache_salt` of a request: two that differ in either part never share a block.

    tenant:   whose request it is, or any salt of yours; may be empty
    identity: of the memory that it uses (`memory_identity`), or of its prefix (`prefix_identity`); None: it uses none.
              With both, the salt of one is the tenant of the other
    """
    return canonical_json({"engram": identity, "tenant": tenant}).decode()
