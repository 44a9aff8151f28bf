"""Segments on chosen memory nodes, and on which nodes their pages came to lie."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from treadle.contract import InvalidArgument
from treadle.kernels import numa, pages
from treadle.kernels.numa_nodes import SAMPLES, sampled_nodes
from treadle.kernels.segment import Segment, SegmentWriter

ROWS = np.random.default_rng(0).integers(0, 256, (20_000, 320), dtype=np.uint8)


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(f"/dev/shm/treadle-nodes-{secrets.token_hex(4)}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("policy", ["", "local", "interleave", "node:0"])
def test_a_segment_is_placed_and_read_back_whatever_the_policy(path: Path, policy: str) -> None:
    with SegmentWriter(path, rows=20_000, row_bytes=320, numa=policy) as writer:
        writer.append(ROWS)
        writer.publish({})
    with Segment(path) as segment:
        segment.verify()
        assert (segment.rows == ROWS).all()
        told = segment.nodes()
        if not told:
            pytest.skip("the kernel does not tell nodes: built for one, or the container forbids get_mempolicy")
        assert sum(told.values()) == SAMPLES
        assert set(told) <= set(numa.nodes())


def test_the_policy_is_set_before_anything_is_allocated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, str]] = []

    def place(address: int, length: int, policy: str) -> str:
        seen.append((path.with_name(path.name + ".partial").stat().st_blocks, length, policy))
        return "noted"

    monkeypatch.setattr(pages, "place", place)
    with SegmentWriter(path, rows=20_000, row_bytes=320, numa="interleave") as writer:
        allocated = path.with_name(path.name + ".partial").stat().st_blocks
    assert seen == [(0, allocated * 512, "interleave")]
    assert writer.path == path


def test_a_policy_that_is_none_leaves_nothing_behind(path: Path) -> None:
    for policy in ("everywhere", "node:99", "node:x"):
        with pytest.raises(InvalidArgument):
            numa.check_policy(policy)
        with pytest.raises(InvalidArgument):
            SegmentWriter(path, rows=10, row_bytes=320, numa=policy)
    assert not path.with_name(path.name + ".partial").exists()


def test_files_on_disk_are_not_asked_and_not_touched(tmp_path: Path) -> None:
    with (tmp_path / "probe").open("wb") as file:
        if pages.file_system(file.fileno()) in pages.MEMORY_FILE_SYSTEMS:
            pytest.skip("the test folder lies in memory itself")
    with SegmentWriter(tmp_path / "a", rows=20_000, row_bytes=320) as writer:
        writer.append(ROWS)
        writer.publish({})
    with Segment(tmp_path / "a") as segment:
        assert segment.nodes() == {}


def test_ordinary_memory_lies_somewhere() -> None:
    told = sampled_nodes(np.ones(1 << 20, dtype=np.uint8))
    assert not told or sum(told.values()) == SAMPLES
    assert sampled_nodes(np.empty(0, dtype=np.uint8)) == {}
