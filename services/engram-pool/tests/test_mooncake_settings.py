"""The mooncake door is off unless asked for, and refuses what would leave it open or unreachable. Needs no Mooncake."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engram_pool.settings import Settings
from treadle.chassis.settings import WrongSetting
from treadle.contract import EngramModel, NotFound

if TYPE_CHECKING:
    from tests.conftest import Serve


@pytest.mark.parametrize("listen", ["0.0.0.0:7421", "[::]:7421", "10.0.7.11:7421", "7421", "127.0.0.1:99999"])
def test_an_address_that_clients_cannot_be_told_or_that_asks_for_no_key_stops_the_start(listen: str) -> None:
    with pytest.raises(WrongSetting):
        Settings(mooncake_listen=listen)


def test_beyond_loopback_it_needs_keys(tmp_path: Path) -> None:
    assert Settings(mooncake_listen="10.0.7.11:7421", api_key_file=tmp_path / "keys").mooncake_listen == "10.0.7.11:7421"
    assert Settings().mooncake_listen == ""
    assert Settings(mooncake_listen="127.0.0.1:0").mooncake_slots == 16
    with pytest.raises(WrongSetting, match="mooncake_slots"):
        Settings(mooncake_slots=0)


async def test_a_pool_without_the_door_says_which_doors_there_are(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        await served.load(ple, None)
        with pytest.raises(NotFound, match="no mooncake door"):
            await asyncio.to_thread(served.fabric.engram.open, "ple", transport="mooncake")
