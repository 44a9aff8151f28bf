"""The gateway's page in a real browser, in front of a real model with rows from a real pool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from treadle_loadtests.browser import MISSING, Browser, chromium
from treadle_loadtests.page_figure import HEIGHT, WIDTH, take

from .conftest import PLAIN_KEY, RunningFabric, until

PNG_BYTES_MAX = 300_000


@pytest.mark.skipif(chromium() is None, reason=MISSING)
def test_people_see_which_memory_answered_and_how_its_rows_came(fabric: RunningFabric, tmp_path: Path) -> None:
    path = chromium()
    assert path is not None
    with Browser(path, width=WIDTH, height=HEIGHT) as browser:
        browser.open(f"{fabric.url}/")
        browser.wait("!document.querySelector('#notice').hidden", "a key is asked for")
        browser.write("#key", PLAIN_KEY)
        browser.press("Enter", 13)
        take(browser, tmp_path / "page.png")
        plain, remembered = browser.value("[...document.querySelectorAll('.turn.assistant ul')].map((list) => list.textContent)")
        assert "no memory" in plain
        assert re.search(r"memory kjv@[0-9a-f]{8} \(mapped\)", remembered)
        assert "not degraded" in remembered
        assert browser.value(
            "[...document.querySelectorAll('.turn.assistant p')].every((answer) => answer.textContent.length > 20)"
        )
        until(lambda: "mapped" in browser.text("[data-chart='Bytes of rows by transport'] .now"))
        assert "p50" in browser.text("[data-chart='Slack of row lookups'] .now")
        assert re.search(r"[1-9]\d* of [1-9]", browser.text("#layers"))
        drawn = "document.querySelector(\"[data-chart='Tokens'] polyline\").getAttribute('points').split(' ').map((at) => at.split(',')[1])"
        assert len(set(browser.value(drawn))) > 1, "the line of tokens moved"
        assert all("401" in error for error in browser.errors), browser.errors
    assert 10_000 < (tmp_path / "page.png").stat().st_size < PNG_BYTES_MAX
