"""A picture of the gateway's page while it answers: `python -m treadle_loadtests.page_figure --url http://127.0.0.1:8000 --out FILE`.

Owns the scene: two questions, one with each of two choices of memory, and the charts that they move.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from treadle_loadtests.browser import MISSING, Browser, chromium

WIDTH, HEIGHT = 1280, 1400
ANSWER_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Take the picture. Returns 0, or 2 where there is no browser."""
    parser = argparse.ArgumentParser(prog="treadle_loadtests.page_figure", description="A picture of the gateway's page.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--key", default="", help="a key of the gateway, where it asks for one")
    parser.add_argument("--dark", action="store_true", help="as on a dark desktop")
    wanted = parser.parse_args(argv)
    path = chromium()
    if path is None:
        sys.stderr.write(f"{MISSING}\n")
        return 2
    with Browser(path, width=WIDTH, height=HEIGHT, dark=wanted.dark) as browser:
        browser.open(f"{wanted.url}/")
        if wanted.key:
            browser.write("#key", wanted.key)
            browser.press("Enter", 13)
        take(browser, wanted.out)
    return 0


def take(browser: Browser, out: Path) -> None:
    """Ask without a memory and with the first one, and take the picture while the second answer's charts still move."""
    browser.wait("document.querySelector('#memory').options.length > 1", "the memories are listed")
    memories = browser.value("[...document.querySelector('#memory').options].map((option) => option.value)")
    for number, (memory, question) in enumerate(
        (("none", "Write a sentence about weaving."), (memories[-1], "And the LORD spake unto Moses, saying,")), 1
    ):
        browser.value(f"document.querySelector('#memory').value = {json.dumps(memory)}")
        browser.value("document.querySelector('#tokens').value = 60")
        browser.write("#question", question)
        browser.press("Enter", 13)
        browser.wait(f"document.querySelectorAll('.turn.assistant ul').length === {number}", "the answer ends", ANSWER_SECONDS)
    browser.wait("[...document.querySelectorAll('#layers tbody tr')].length > 0", "the layers are shown")
    out.parent.mkdir(parents=True, exist_ok=True)
    browser.screenshot(out)


if __name__ == "__main__":
    sys.exit(main())
