"""Chats with a gateway as strangers hold them: over HTTP, each in a thread, and each with an end that is written down."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

WHOLE, DEGRADED, ERROR, UNCLEAR, HUNG = "whole", "degraded", "error", "unclear", "hung"


@dataclass(slots=True)
class Chat:
    """One chat. `start` it, `join` it; the rest is for reading.

    late_seconds: how long after `deadline_seconds` it may end before it counts as hung
    outcome: whole · degraded: answered with memory missing, and it says so · error: one with a code of its own ·
             unclear: cut off, or something that is no answer · hung: not over in time
    code:    of the error; because: why memory was missing
    pieces:  with text that came so far
    """

    gateway: str
    body: dict[str, Any]
    deadline_seconds: float
    late_seconds: float = 2.0
    outcome: str = ""
    code: str = ""
    because: str = ""
    pieces: int = 0
    seconds: float = 0.0
    _thread: threading.Thread | None = field(default=None, repr=False)

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="chat", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for its end, or for the time at which it is hung."""
        assert self._thread is not None
        self._thread.join(self.deadline_seconds + self.late_seconds + 5.0)
        self.outcome = self.outcome or HUNG

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return bool(self.outcome)

    def _run(self) -> None:
        begun, limit = time.monotonic(), self.deadline_seconds + self.late_seconds
        connection = http.client.HTTPConnection(self.gateway, timeout=limit)
        outcome = UNCLEAR
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(self.body), {"content-type": "application/json"})
            response = connection.getresponse()
            if self.body.get("stream") and response.status == 200:
                outcome = self._read_events(response)
            else:
                outcome = self._judge(json.loads(response.read()))
        except TimeoutError:
            outcome = HUNG
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.code = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
            self.seconds = time.monotonic() - begun
            self.outcome = HUNG if self.seconds > limit else outcome

    def _read_events(self, response: http.client.HTTPResponse) -> str:
        outcome = UNCLEAR
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return outcome
            event = json.loads(line[6:])
            self.pieces += any(choice["delta"].get("content") for choice in event.get("choices", ()))
            if "error" in event or "treadle" in event:
                outcome = self._judge(event)
        return UNCLEAR

    def _judge(self, answer: dict[str, Any]) -> str:
        if "error" in answer:
            self.code = answer["error"].get("code") or ""
            return ERROR if self.code else UNCLEAR
        if not answer["treadle"]["degraded"]:
            return WHOLE
        self.because = next((memory["missing_because"] for memory in answer["treadle"]["memory"] if memory["missing_because"]), "")
        return DEGRADED
