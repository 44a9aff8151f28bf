"""Settings of a dictionary as a command line gives them: `--set heads_joined=3`, one field of `DictionarySettings` each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from enum import StrEnum

from treadle.contract.dictionary import DictionarySettings
from treadle.contract.errors import InvalidArgument


def settings_of(changes: Sequence[str]) -> DictionarySettings:
    """The defaults with some fields changed. Raises InvalidArgument naming what is unknown or wrong."""
    settings = DictionarySettings()
    known = [field.name for field in fields(DictionarySettings)]
    for change in changes:
        name, _, value = change.partition("=")
        if name not in known or not value:
            raise InvalidArgument(f"--set {change}: NAME=VALUE expected, NAME one of {', '.join(known)}")
        kind = type(getattr(settings, name))
        try:
            settings = replace(settings, **{name: kind(value)})
        except ValueError as error:
            allowed = ", ".join(kind) if issubclass(kind, StrEnum) else "a whole number"
            raise InvalidArgument(f"--set {change}: {allowed} expected") from error
    return settings
