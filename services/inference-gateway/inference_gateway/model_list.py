"""What `/v1/models` says: the model, and an alias for each memory that can be chosen with it.

Owns these answers. Which memory a request gets is domain.memories'.
"""

from __future__ import annotations

from inference_gateway.answer_models import ModelAnswer
from inference_gateway.domain.errors import ModelNotFound
from inference_gateway.domain.memories import (
    TEXT_TOLD_MAX,
    WORKERS_DEFAULT,
    Chosen,
    ChosenBy,
    Memory,
    MemoryChoice,
    alias_choice,
    choosable,
    default_of,
    find,
    refusal,
    why_not,
)
from inference_gateway.domain.served_model import ServedModel

ALIASES_MAX = 256  # listed; every memory can be chosen, listed or not


def model_list(model: ServedModel, key_default: MemoryChoice | None) -> list[ModelAnswer]:
    """The model, then its aliases by name. `key_default`: the memory of the caller's key."""
    names = sorted(memory.name for memory in choosable(model.memories))[:ALIASES_MAX]
    return [model_answer(model, asked, key_default) for asked in (model.name, *(f"{model.name}+{name}" for name in names))]


def model_answer(model: ServedModel, asked: str, key_default: MemoryChoice | None) -> ModelAnswer:
    """The entry of the model or of an alias, under the name that was asked for.

    Raises ModelNotFound for a name that is neither, or whose memory cannot be chosen or is not of that version now, and
    Unavailable while the worker does not know which memories there are.
    """
    given = key_default or WORKERS_DEFAULT
    alias = alias_choice(asked, model.name)
    if alias is None:
        return _entry(model, asked, given, default=True)
    reason = why_not(alias, model.memories)
    if reason is not None:
        raise refusal(Chosen(alias, ChosenBy.ALIAS), asked, reason)
    memory = _memory(model, alias)
    if memory is not None and not memory.version.startswith(alias.version):
        raise ModelNotFound(
            f"the model {asked[:TEXT_TOLD_MAX]!r} is not listed: the current version of {memory.name!r} is {memory.version}"
        )
    return _entry(model, asked, alias, default=_name(model, alias) == _name(model, given))


def _entry(model: ServedModel, asked: str, choice: MemoryChoice, *, default: bool) -> ModelAnswer:
    memory = _memory(model, choice)
    return {
        "id": asked,
        "object": "model",
        "created": model.since_unix,
        "owned_by": "treadle",
        "max_model_len": model.context_tokens_max,
        "treadle": {
            "engram": _name(model, choice) or None,
            "version": memory.version if memory else None,
            "default": default,
            "open": bool(memory and memory.open),
        },
    }


def _name(model: ServedModel, choice: MemoryChoice) -> str:
    memory = _memory(model, choice)
    return memory.name if memory else choice.name or ""


def _memory(model: ServedModel, choice: MemoryChoice) -> Memory | None:
    return default_of(model.memories) if choice.name is None else find(choice.name, model.memories)
