"""`/`: the status-and-chat page, one document put together at the start from the files of `page/`.

Owns the document, its policy and its caching. It holds no data: that it asks `/v1/*` for, with a key where one is needed. Nothing
runs in it but the scripts and styles whose digests the policy names, and it reaches nothing but this gateway.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_STYLES = ("page.css",)
_SCRIPTS = ("figures.js", "charts.js", "status.js", "chat.js", "page.js")  # in this order: later ones use earlier ones
_BLOCKS = re.compile(r"<(?P<tag>script|style)>(?P<text>.*?)</(?P=tag)>", re.DOTALL)


class Page:
    """The document and its headers. Made once."""

    def __init__(self) -> None:
        folder = files("inference_gateway.page")
        html = (folder / "index.html").read_text(encoding="utf-8")
        self._body = (
            html.replace("<!-- styles -->", "".join(f"<style>{(folder / name).read_text('utf-8')}</style>" for name in _STYLES))
            .replace("<!-- scripts -->", "".join(f"<script>{(folder / name).read_text('utf-8')}</script>" for name in _SCRIPTS))
            .encode()
        )
        etag = hashlib.sha256(self._body).hexdigest()[:32]
        self._headers = {
            "content-security-policy": policy(self._body.decode()),
            "etag": f'"{etag}"',
            "cache-control": "no-cache",  # kept, and asked for again: a new version of the gateway shows at once
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "permissions-policy": "camera=(), geolocation=(), microphone=()",
        }

    async def answer(self, request: Request) -> Response:
        """GET /: the document, or 304 for who has it."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self._headers["etag"] in known or known == ["*"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers, media_type="text/html")


def policy(html: str) -> str:
    """The Content-Security-Policy of a document: its own scripts and styles by digest, requests to its own host, nothing else."""
    blocks = [(match["tag"], match["text"]) for match in _BLOCKS.finditer(html)]
    scripts = _digests([text for tag, text in blocks if tag == "script"])
    styles = _digests([text for tag, text in blocks if tag == "style"])
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def _digests(texts: Sequence[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
