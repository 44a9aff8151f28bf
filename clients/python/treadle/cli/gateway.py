"""How the command finds and asks a gateway, before any SDK of OpenAI comes in."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.cli.run_folder import RunFolder
from treadle.contract.errors import NotFound, Unavailable

DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_SECONDS = 5.0
KEY_VARIABLE = "TREADLE_API_KEY"
HASHED = "sha256:"  # how a line of a key file begins that holds a digest
_EVERY_INTERFACE = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True)
class ServedName:
    """A name that a gateway serves, and the memory that answers under it; `engram` and `version` are empty where there is none."""

    id: str
    engram: str = ""
    version: str = ""
    open: bool = False


def reachable_url(listen: str) -> str:
    """Where a client on this host reaches a gateway that listens on `host:port`."""
    host, _, port = listen.removeprefix("http://").rpartition(":")
    return f"http://{join_address('127.0.0.1' if host in _EVERY_INTERFACE else host, port)}"


def join_address(host: str, port: int | str) -> str:
    """`host:port`, with brackets around a host that has colons itself."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def find_gateway(folder: RunFolder, url: str = "", key_file: str = "") -> tuple[str, str | None]:
    """(URL, key) of the gateway meant: the one given, else the one that is up, else the default port."""
    state = folder.read()
    if not url and state is not None and state.stage == "starting":
        raise Unavailable(f"treadle is still starting ({state.step}); try again once `treadle status` says ready")
    running = state.gateway_url if state else DEFAULT_URL
    return (url or running).rstrip("/").removesuffix("/v1"), first_key(key_file or (state.api_key_file if state else ""))


def served_model(url: str, key: str | None = None, seconds: float = ANSWER_SECONDS) -> str:
    """Name of the first model that a gateway serves. Unavailable if it does not answer."""
    return served_names(url, key, seconds)[0].id


def served_names(url: str, key: str | None = None, seconds: float = ANSWER_SECONDS) -> list[ServedName]:
    """All names that a gateway lists, at least one: the model's first, then `MODEL+MEMORY`. Unavailable if it does not answer."""
    try:
        names = [_served_name(entry) for entry in json.loads(get(f"{url}/v1/models", key, seconds))["data"]]
        names[0]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise Unavailable(f"{url}/v1/models is not a list of models; is this a treadle gateway?") from error
    return names


def _served_name(entry: dict[str, Any]) -> ServedName:
    memory = entry.get("treadle") or {}
    return ServedName(str(entry["id"]), memory.get("engram") or "", memory.get("version") or "", bool(memory.get("open")))


def get(url: str, key: str | None = None, seconds: float = ANSWER_SECONDS) -> bytes:
    """The body of a 200 answer. Unavailable, saying what came instead."""
    request = urllib.request.Request(url)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            raise Unavailable(f"{url} answers {error.code} {error.reason}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"{url} does not answer ({reason}); is it up? `treadle up` starts it") from error


def first_key(path: str) -> str | None:
    """The key to show: TREADLE_API_KEY, else the first in a key file (one a line, options behind it or not; # is a comment).

    None for no file. Raises NotFound for a file that cannot be read, or holds digests alone, which nobody can show.
    """
    if KEY_VARIABLE in os.environ or not path:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise NotFound(f"the key file {path} cannot be read: {error.strerror}") from error
    words = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    keys = [word for word in words if not word.startswith(HASHED)]
    if words and not keys:
        raise NotFound(f"{path} holds digests of keys alone: put one of the keys into {KEY_VARIABLE}")
    return keys[0] if keys else None
