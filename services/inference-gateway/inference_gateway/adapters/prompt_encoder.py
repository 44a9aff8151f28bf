"""Prompts into token ids with the tokenizer.json and chat template of a Hugging Face model folder.

Owns reading the folder and checking that its tokenizer is the worker's. Token ids into text is the worker's part.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tokenizers import Tokenizer

from inference_gateway.adapters.chat_template import ChatTemplate
from inference_gateway.domain.errors import RequestRefused
from inference_gateway.domain.generation import ChatPrompt
from inference_gateway.domain.tool_calls import ToolForm
from treadle.contract.errors import FingerprintMismatch, InvalidArgument, NotFound


class FolderEncoder:
    """Tokenizer and chat template of one model folder. Both may be used from several threads.

    `tokens_max` of a prompt bounds the work: a text that cannot fit into as many tokens is refused without tokenizing it.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        tokenizer.no_truncation()  # a prompt that is cut in silence is answered wrongly
        tokenizer.no_padding()
        self._tokenizer, self._template = tokenizer, template
        self._longest_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    @property
    def tool_form(self) -> ToolForm | None:
        """How the template has the model write calls of tools."""
        return None if self._template is None else self._template.tool_form

    def encode_chat(self, prompt: ChatPrompt, tokens_max: int) -> list[int]:
        """Token ids of the rendered turns; the template itself writes the special tokens."""
        if self._template is None:
            raise RequestRefused("this model has no chat template; use /v1/completions", param="messages")
        return self._encode(self._template.render(prompt), tokens_max, "messages", special_tokens=False)

    def encode_text(self, text: str, tokens_max: int) -> list[int]:
        """Token ids of `text` with what the tokenizer adds by itself, e.g. a beginning of sequence."""
        return self._encode(text, tokens_max, "prompt", special_tokens=True)

    def _encode(self, text: str, tokens_max: int, field: str, *, special_tokens: bool) -> list[int]:
        size_bytes, bytes_max = len(text.encode()), tokens_max * self._longest_token_bytes
        if size_bytes > bytes_max:
            raise RequestRefused(
                f"this model's maximum context length is {tokens_max} tokens, which hold at most {bytes_max} bytes of text; "
                f"the {field} has {size_bytes}; shorten the {field}",
                param=field,
                code="context_length_exceeded",
            )
        # Of the tokenizer's calls only those for batches let go of the GIL: a long text must not stop the event loop.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0]
        return list(encoding.ids)


def open_folder(folder: Path, tokenizer_digest: str) -> FolderEncoder:
    """The encoder of `folder`, whose tokenizer.json must have the sha256 `tokenizer_digest`.

    Raises NotFound (no such file here), FingerprintMismatch (another tokenizer than the worker's), InvalidArgument (a file
    that cannot be understood).
    """
    path = folder / "tokenizer.json"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotFound(
            f"cannot read {path} ({error.strerror}); if the worker runs on another host, name a copy of its folder with tokenizer_dir"
        ) from error
    actual = hashlib.sha256(content).hexdigest()
    if actual != tokenizer_digest:
        raise FingerprintMismatch("tokenizer_digest", tokenizer_digest, actual)
    try:
        tokenizer = Tokenizer.from_buffer(content)  # the very bytes that were checked
    except Exception as error:  # the Rust side raises bare Exception
        raise InvalidArgument(f"{path} is not a tokenizer: {error}") from error
    return FolderEncoder(tokenizer, _template(folder))


class SharedEncoders:
    """Fits domain.ports.EncoderSource: `open_folder` that reads a folder once for all workers that run what lies in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weakly: once no worker runs it, the folder is read again, for its template may have changed.
        self._encoders: WeakValueDictionary[tuple[Path, str], FolderEncoder] = WeakValueDictionary()

    def __call__(self, folder: Path, tokenizer_digest: str) -> FolderEncoder:
        """See `open_folder`."""
        with self._lock:  # also while it is read: those who want the same wait for it
            encoder = self._encoders.get((folder, tokenizer_digest))
            if encoder is None:
                encoder = self._encoders[folder, tokenizer_digest] = open_folder(folder, tokenizer_digest)
            return encoder


def _template(folder: Path) -> ChatTemplate | None:
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = {name: text for name, value in config.items() if name.endswith("_token") and (text := _token_text(value))}
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else _default_template(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise InvalidArgument(f"{path}: an object expected, got {type(loaded).__name__}")
    return loaded


def _token_text(value: Any) -> str | None:
    """A special token as text: configurations hold it plain or as {"content": …}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _default_template(value: Any) -> str | None:
    """The template to chat with: configurations hold one, or a list of named ones."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
