"""W3C trace contexts: read, passed on, and left out where they are not well-formed."""

from __future__ import annotations

import asyncio

import pytest

from treadle.contract.trace import TraceContext, current_trace, in_trace, parse_trace, trace_headers

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_context_is_read_and_written_as_it_came() -> None:
    context = parse_trace(f"00-{TRACE}-{SPAN}-01", "vendor=opaque,other=1")
    assert context == TraceContext(TRACE, SPAN, True, "vendor=opaque,other=1")
    assert context.headers == (("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "vendor=opaque,other=1"))
    assert parse_trace(context.traceparent, context.state) == context


def test_other_flags_than_sampled_are_not_passed_on() -> None:
    context = parse_trace(f"00-{TRACE}-{SPAN}-fe")
    assert context is not None
    assert (context.sampled, context.traceparent[-2:]) == (False, "00")


def test_a_later_version_may_say_more() -> None:
    assert parse_trace(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "header",
    [
        None, "", "00", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-more", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}-0x",
    ],
)  # fmt: skip
def test_what_is_not_well_formed_is_no_trace(header: str | None) -> None:
    assert parse_trace(header, "vendor=opaque") is None


@pytest.mark.parametrize("state", ["x" * 513, "a=1,\nb=2", "a=é"])
def test_a_state_that_cannot_be_passed_on_is_left_out_whole(state: str) -> None:
    assert parse_trace(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, True)


async def test_tasks_belong_to_the_trace_that_they_were_started_in() -> None:
    context = TraceContext(TRACE, SPAN, True)

    async def look() -> TraceContext | None:
        await asyncio.sleep(0)
        return current_trace()

    assert trace_headers() == ()
    with in_trace(context):
        task = asyncio.create_task(look())
        with in_trace(None):
            assert trace_headers() == ()
        assert trace_headers() == context.headers
    assert current_trace() is None
    assert await task == context
