"""Prompt and answer as the model's own chat template writes them, so that calibration sees the tokens that requests bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.contract.errors import InvalidArgument

Wrap = Callable[[str], str]


def chat_wrap(model_folder: Path) -> Wrap:
    """A function that turns one user's prompt into the text up to the beginning of the answer.

    Raises InvalidArgument where the model has no chat template.
    """
    wrap = known_chat_wrap(model_folder)
    if wrap is None:
        raise InvalidArgument(f"{model_folder}: the model has no chat template; leave --chat out")
    return wrap


def known_chat_wrap(model_folder: Path) -> Wrap | None:
    """The same; None where the model has no chat template."""
    from transformers import AutoTokenizer  # slow to import, and needed for chats alone

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if not tokenizer.chat_template:
        return None

    def wrap(prompt: str) -> str:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True))

    return wrap
