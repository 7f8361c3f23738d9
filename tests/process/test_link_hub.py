"""Sessions of a worker: they outlive connections for a while, and end once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from baton.process.links.hub import MAX_WAITING, REPEAT_S, LinkHub, Outbox, RouterLink
from tests.fixtures.loop_clock import put_forward
from tests.fixtures.waiting import eventually

ROUTER = b"r" * 16


@dataclass
class Note:
    text: str = ""
    number: int = 0
    acknowledged: int = 0


Session = RouterLink[Note]


class Hub(LinkHub[Note]):
    """Remembers the sessions that ended."""

    def __init__(self, grace_s: float = 10.0, max_unacknowledged: int = 3) -> None:
        self.ended: list[Session] = []
        super().__init__(grace_s, max_unacknowledged, self.ended.append)


async def written(outbox: Outbox[Note]) -> list[str]:
    """Everything up to the end of a connection."""
    async with asyncio.timeout(20):
        return [note.text async for note in outbox.drain()]


def connected(hub: Hub, resumes: bool = False) -> tuple[Session, Outbox[Note]]:
    session, _ = hub.connect(ROUTER, resumes)
    assert session.outbox is not None
    return session, session.outbox


async def test_numbers_go_on_while_the_router_is_away() -> None:
    hub = Hub()
    session, outbox = connected(hub)
    hub.send(session, Note("1"))
    hub.disconnect(session, outbox)
    hub.send(session, Note("2"))
    again, resumed = hub.connect(ROUTER, resumes=True)
    assert again is session and resumed and session.expiry is None
    assert [kept.number for kept in session.channel.unacknowledged()] == [1, 2]
    await hub.close(0.0)


async def test_session_ends_once_when_its_grace_is_over() -> None:
    hub = Hub(grace_s=0.001)
    session, outbox = connected(hub)
    hub.disconnect(session, outbox)
    await eventually(lambda: hub.ended)
    hub.end(session, "again")
    assert hub.ended == [session] and hub.links == ()


async def test_session_resumed_within_its_grace_outlives_that_grace() -> None:
    """The timer of the lost connection would end the requests of a router that is back."""
    hub = Hub(grace_s=10.0)
    session, outbox = connected(hub)
    hub.disconnect(session, outbox)
    connected(hub, resumes=True)
    grace_over = asyncio.Event()
    asyncio.get_running_loop().call_later(10.0, grace_over.set)
    put_forward(11.0)
    await grace_over.wait()
    assert hub.ended == [] and hub.links == (session,)
    await hub.close(0.0)


async def test_restarted_router_ends_its_old_session() -> None:
    hub = Hub()
    old, outbox = connected(hub)
    new, resumed = hub.connect(ROUTER, resumes=False)
    assert new is not old and not resumed and hub.ended == [old] and outbox.closed
    hub.disconnect(old, outbox)  # the old connection notices later, and changes nothing
    assert new.outbox is not None and hub.links == (new,) and old.expiry is None
    await hub.close(0.0)


async def test_newer_connection_replaces_the_old_one() -> None:
    hub = Hub()
    session, first = connected(hub)
    _, second = connected(hub, resumes=True)
    assert first.closed and not second.closed
    hub.disconnect(session, first)
    assert session.outbox is second and session.expiry is None
    await hub.close(0.0)


async def test_router_that_acknowledges_nothing_loses_its_session() -> None:
    hub = Hub(max_unacknowledged=2)
    session, outbox = connected(hub)
    for _ in range(3):
        hub.send(session, Note())
    assert hub.ended == [session] and outbox.closed
    hub.send(session, Note())  # whoever still has it sends into the void
    assert session.channel.unacknowledged_count == 2


async def test_close_lets_connections_finish_and_then_ends_every_session() -> None:
    hub = Hub()
    session, outbox = connected(hub)
    hub.send(session, Note("last"))

    async def connection() -> list[str]:
        notes = await written(outbox)
        assert not session.ended
        hub.disconnect(session, outbox)
        return notes

    writing = asyncio.create_task(connection())
    await hub.close(5.0)
    assert await writing == ["last"]
    assert hub.closed and hub.ended == [session] and hub.links == ()


async def test_close_is_bounded() -> None:
    hub = Hub()
    session, outbox = connected(hub)
    await hub.close(0.001)
    assert hub.ended == [session] and outbox.closed


async def test_lossy_message_is_unnumbered_in_order_and_lost_without_a_connection() -> None:
    hub = Hub()
    session, outbox = connected(hub)
    hub.send(session, Note("1"))
    session.send_lossy(Note("between"))
    hub.send(session, Note("2"))
    outbox.finish()
    assert await written(outbox) == ["1", "between", "2"]
    assert session.channel.unacknowledged_count == 2
    hub.disconnect(session, outbox)
    session.send_lossy(Note("nobody hears"))
    _, again = connected(hub, resumes=True)
    again.finish()
    assert await written(again) == []


async def test_lossy_messages_are_lost_where_too_much_is_still_to_be_written() -> None:
    session, outbox = connected(Hub())
    for _ in range(MAX_WAITING + 5):
        session.send_lossy(Note())
    assert outbox.waiting == MAX_WAITING


async def test_message_is_delivered_once_all_connected_routers_acknowledged(caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub()
    session, outbox = connected(hub)
    hub.send(session, Note("last"))
    waiting = asyncio.create_task(hub.delivered(5.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    session.channel.acknowledge(1)
    await waiting
    hub.send(session, Note("to nobody"))
    hub.disconnect(session, outbox)
    await hub.delivered(5.0)
    assert "did not acknowledge" not in caplog.text
    await hub.close(0.0)


async def test_messages_between_reports_are_written_in_order_with_only_the_newest_report() -> None:
    _, outbox = connected(Hub())
    for number in (1, 2, 3):
        outbox.put(Note(str(number)))
        outbox.put_latest(Note(f"report {number}"))
    outbox.finish()
    assert await written(outbox) == ["1", "report 3", "2", "3"]


@pytest.mark.parametrize(
    "wake", [lambda box: box.put(Note()), lambda box: box.put_latest(Note()), Outbox.finish, Outbox.close]
)
async def test_connection_that_waits_is_woken_by_anything_to_do(wake: Callable[[Outbox[Note]], None]) -> None:
    outbox: Outbox[Note] = Outbox()
    waiting = asyncio.ensure_future(anext(outbox.drain(), None))
    await asyncio.sleep(0)
    wake(outbox)
    async with asyncio.timeout(20):
        await waiting


async def test_closed_outbox_writes_nothing_more() -> None:
    _, outbox = connected(Hub())
    for number in range(3):
        outbox.put(Note(str(number)))
    notes = [note async for note in closing_after_one(outbox)]
    assert notes == ["0"]


async def closing_after_one(outbox: Outbox[Note]) -> AsyncIterator[str]:
    async for note in outbox.drain():
        outbox.put_latest(Note("never"))
        outbox.close()
        yield note.text


async def test_every_message_acknowledges_the_last_received() -> None:
    hub = Hub()
    session, outbox = connected(hub)
    assert session.channel.receive(1)
    notes = [Note(), Note(), Note()]
    for send, note in zip((session.send, session.send_lossy, session.send_latest), notes, strict=True):
        send(note)
    assert [(note.number, note.acknowledged) for note in notes] == [(1, 1), (0, 1), (0, 1)]
    hub.disconnect(session, outbox)
    session.send_latest(Note("nobody hears"))
    await hub.close(0.0)


def sends(link: Session, content: bytes) -> bool:
    """Return whether a report with this content is sent now."""
    note = Note(acknowledged=-1)
    link.send_latest(note, content)
    return note.acknowledged >= 0


async def test_unchanged_report_is_sent_again_only_after_a_while() -> None:
    link, _ = connected(Hub())
    assert [sends(link, content) for content in (b"1", b"1", b"2", b"2", b"1")] == [True, False, True, False, True]
    put_forward(REPEAT_S)
    assert [sends(link, b"1"), sends(link, b"1")] == [True, False]


async def test_report_without_content_and_the_first_of_a_connection_are_always_sent() -> None:
    hub = Hub()
    link, _ = connected(hub)
    assert [sends(link, content) for content in (b"", b"", b"1")] == [True, True, True]
    link, _ = connected(hub, resumes=True)
    assert sends(link, b"1")


async def test_router_asks_for_fewer_unchanged_reports_and_for_more_again() -> None:
    link, _ = connected(Hub())
    assert sends(link, b"1")
    link.repeat_every(10 * REPEAT_S)
    put_forward(REPEAT_S)
    assert [sends(link, b"1"), sends(link, b"1")] == [True, False], "the first interval began before the router asked"
    put_forward(REPEAT_S)
    assert not sends(link, b"1")
    link.repeat_every(REPEAT_S)
    put_forward(REPEAT_S)
    assert sends(link, b"1")


async def test_grace_begins_with_the_disconnection_and_ends_the_session_once() -> None:
    hub = Hub(grace_s=10.0)
    session, outbox = connected(hub)
    hub.disconnect(session, outbox)
    assert session.expiry is not None
    assert session.expiry.when() - asyncio.get_running_loop().time() == pytest.approx(10.0, abs=5.0)
    hub.end(session, "another reason")
    assert session.expiry.cancelled()
    hub.disconnect(session, outbox)
    assert hub.ended == [session]


async def test_session_that_ended_while_it_was_connected_has_no_grace() -> None:
    hub = Hub()
    session, outbox = connected(hub)
    hub.end(session, "overflow")
    hub.disconnect(session, outbox)
    assert session.expiry is None
    new, resumed = hub.connect(ROUTER, resumes=True)
    assert new is not session and not resumed
    await hub.close(0.0)


async def test_wait_for_delivery_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub()
    session, _ = connected(hub)
    hub.send(session, Note("last"))
    await hub.delivered(0.001)
    assert "did not acknowledge" in caplog.text
    await hub.close(0.0)
