"""Numbering, acknowledging and replay; and that nothing is lost or repeated over links that break."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.process.links.channel import LinkChannel, LinkOverflow, LinkViolation, Numbered, Received


def test_numbers_start_at_one_and_are_contiguous() -> None:
    channel = LinkChannel[str](max_unacknowledged=8)
    assert [channel.number(text) for text in "abc"] == [1, 2, 3]


def test_unacknowledged_messages_are_kept_in_order_and_dropped_when_acknowledged() -> None:
    channel = LinkChannel[str](max_unacknowledged=8)
    for text in "abcd":
        channel.number(text)
    channel.acknowledge(2)
    channel.acknowledge(1)
    assert list(channel.unacknowledged()) == [Numbered(3, "c"), Numbered(4, "d")]


def test_acknowledging_an_unsent_message_is_a_violation() -> None:
    channel = LinkChannel[str](max_unacknowledged=8)
    channel.number("a")
    with pytest.raises(LinkViolation):
        channel.acknowledge(2)


def test_overflow_refuses_the_message_and_keeps_the_others() -> None:
    channel = LinkChannel[str](max_unacknowledged=2)
    channel.number("a")
    channel.number("b")
    with pytest.raises(LinkOverflow):
        channel.number("c")
    assert [kept.message for kept in channel.unacknowledged()] == ["a", "b"]
    channel.acknowledge(1)
    assert channel.number("c") == 3


def test_received_numbers_are_fresh_once_and_gaps_change_nothing() -> None:
    channel = LinkChannel[str](max_unacknowledged=1)
    assert channel.receive(1) is Received.FRESH
    assert channel.receive(1) is Received.DUPLICATE
    assert channel.receive(3) is Received.GAP
    assert channel.last_received == 1
    assert channel.receive(2) is Received.FRESH


class _End:
    """One end over a link that carries messages in order until it breaks, then loses what is under way."""

    def __init__(self) -> None:
        self.channel = LinkChannel[int](max_unacknowledged=1000)
        self.delivered: list[int] = []
        self.under_way: list[tuple[int, int, int]] = []  # number, acknowledged, payload; towards the other end

    def send(self, payload: int) -> None:
        self.under_way.append((self.channel.number(payload), self.channel.last_received, payload))

    def take(self, number: int, acknowledged: int, payload: int) -> None:
        self.channel.acknowledge(acknowledged)
        verdict = self.channel.receive(number)
        assert verdict is not Received.GAP  # the link keeps the order while it lasts
        if verdict is Received.FRESH:
            self.delivered.append(payload)

    def reconnect(self, received_by_other: int) -> None:
        self.channel.acknowledge(received_by_other)
        kept = self.channel.unacknowledged()
        self.under_way = [(each.number, self.channel.last_received, each.message) for each in kept]


def _arrive(sender: _End, receiver: _End, count: int) -> None:
    arriving, sender.under_way = sender.under_way[:count], sender.under_way[count:]
    for message in arriving:
        receiver.take(*message)


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.booleans(), st.just(0)),
        st.tuples(st.just("arrive"), st.booleans(), st.integers(1, 3)),
        st.tuples(st.just("break"), st.booleans(), st.just(0)),
    ),
    max_size=60,
)


@given(_steps)
def test_each_message_is_delivered_once_and_in_order_over_a_lossy_link(steps: list[tuple[str, bool, int]]) -> None:
    ends = (_End(), _End())
    sent: tuple[list[int], list[int]] = ([], [])
    for serial, (action, second, count) in enumerate(steps):
        sender, receiver = ends[second], ends[not second]
        if action == "send":
            sender.send(serial)
            sent[second].append(serial)
        elif action == "arrive":
            _arrive(sender, receiver, count)
        else:
            _reconnect(ends)
    _reconnect(ends)
    _arrive(ends[0], ends[1], 1000)
    _arrive(ends[1], ends[0], 1000)
    assert ends[1].delivered == sent[0]
    assert ends[0].delivered == sent[1]


def _reconnect(ends: tuple[_End, _End]) -> None:
    received = [end.channel.last_received for end in ends]
    ends[0].reconnect(received[1])
    ends[1].reconnect(received[0])
