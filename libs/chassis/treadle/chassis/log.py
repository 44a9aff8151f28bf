"""Logs: one event with fields a line, on standard error, as text or JSON. Never prompts, tokens, rows or keys."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{clock} {record.levelname.lower():7} {record.name}: {record.getMessage()}" + (f"  {fields}" if fields else "")
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name}
        event |= {"event": record.getMessage()} | _fields(record)
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def configure(level: str = "info", format: str = "text") -> None:
    """Send the root logger to standard error. `level`: debug, info, warning, error. `format`: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
