"""Who may call a gateway without keys: programs of this machine, but not the web pages that its browsers show.

A page of any host can make a browser send requests to loopback; its host then stands in Origin, or in Host where the page's
name was made to lead to 127.0.0.1.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from inference_gateway.domain.errors import PageRefused
from treadle.chassis.settings import is_loopback

_AUTHORITY = r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]+)?"
_HOST = re.compile(_AUTHORITY, re.IGNORECASE)
_ORIGIN = re.compile(r"https?://" + _AUTHORITY, re.IGNORECASE)


def check_local(headers: Headers) -> None:
    """Raise PageRefused unless every Host and Origin is of loopback; programs that are no browser send no Origin."""
    for name, form in (("host", _HOST), ("origin", _ORIGIN)):
        for value in headers.getlist(name):
            match = form.fullmatch(value.strip())
            if match is None or not is_loopback(match["host"].lower()):
                raise PageRefused(
                    f"{name.capitalize()}: {value[:200]!r} is not this machine, and this gateway has no keys; call it as "
                    "127.0.0.1 or localhost, or start it with api_key_file and show a key"
                )
