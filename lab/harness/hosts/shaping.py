"""Properties of links, and their `ip` and `tc` commands. Pure."""

from dataclasses import dataclass

HOST_DEVICE, BRIDGE = "eth0", "bridge"
QUEUE_MS = 50  # longest wait of a packet in the rate limiter's queue
BURST_S, LEAST_BURST_BYTES = 0.001, 16 << 10
RANDOM = 0xFFFFF038  # SKF_AD_OFF + SKF_AD_RANDOM of linux/filter.h: loads a random word
DROP, PASS = 2, 0xFFFFFFFF  # TC_ACT_SHOT, TC_ACT_UNSPEC
WORDS = 1 << 32


@dataclass(frozen=True, slots=True)
class HostLink:
    """Link between a host and all others, the same in both directions. A path between two hosts crosses two links.

    `loss`: fraction of lost packets. A packet is a segment of up to 64 KiB, or a smaller one if a rate limits the link.
    """

    bits_per_s: float | None = None  # None: unlimited
    delay_ms: float | None = None  # 0: a delay can be set later; None: it cannot, since the link has no relay
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is {self.loss:g}, must be from 0 to 1")
        if self.bits_per_s is not None and self.bits_per_s < 8_000:
            raise ValueError(f"bits_per_s is {self.bits_per_s:g}, must be at least 8000")
        if self.delay_ms is not None and not 0 <= self.delay_ms <= 10_000:
            raise ValueError(f"delay_ms is {self.delay_ms:g}, must be from 0 to 10000")


def shape_lines(device: str, link: HostLink) -> list[str]:
    """Return lines for `tc -batch` at one end of a link: its send rate, and the loss of what it receives."""
    if link.bits_per_s is None:
        lines = [f"qdisc replace dev {device} root pfifo limit 10000"]
    else:
        burst_bytes = max(LEAST_BURST_BYTES, int(link.bits_per_s / 8 * BURST_S))
        rate = f"rate {link.bits_per_s:.0f}bit burst {burst_bytes}b latency {QUEUE_MS}ms"
        lines = [f"qdisc replace dev {device} root tbf {rate}"]
    lines.append(f'filter replace dev {device} ingress prio 1 handle 1 bpf da bytecode "{drop_program(link.loss)}"')
    return lines


def drop_program(loss: float) -> str:
    """Return classic BPF for `tc` that drops received packets at random, unnoticed by the sender."""
    if loss in (0, 1):
        return f"1,6 0 0 {DROP if loss else PASS}"
    least_passed = int(loss * WORDS)
    return f"4,32 0 0 {RANDOM},53 1 0 {least_passed},6 0 0 {DROP},6 0 0 {PASS}"


def up_lines(device: str) -> list[str]:
    """Return lines for `tc -batch` that prepare a device for `shape_lines`."""
    return [f"qdisc add dev {device} clsact"]


def bridge_lines(address: str, address6: str) -> list[str]:
    """Return lines for `ip -batch` in the switch that create its bridge."""
    return [
        "link set dev lo up",
        # A fixed MAC address: otherwise the bridge takes that of a port and changes it when a host is lost.
        f"link add name {BRIDGE} address {mac(0)} type bridge mcast_snooping 0",
        *_addressed(BRIDGE, address, address6),
    ]


def host_lines(number: int, address: str, address6: str) -> list[str]:
    """Return lines for `ip -batch` in host `number`, whose MAC address survives a reboot."""
    card = f"link set dev {HOST_DEVICE} address {mac(1 + number)}"
    return ["link set dev lo up", card, *_addressed(HOST_DEVICE, address, address6)]


def mac(number: int) -> str:
    """Return a locally administered MAC address."""
    return f"02:77:00:00:{number >> 8:02x}:{number & 255:02x}"


def port_lines(device: str) -> list[str]:
    """Return lines for `ip -batch` in the switch: the other end of a host's link."""
    return [f"link set dev {device} master {BRIDGE}", f"link set dev {device} up"]


def _addressed(device: str, address: str, address6: str) -> list[str]:
    return [
        f"address add {address}/24 dev {device}",
        f"address add {address6}/64 dev {device} nodad",
        f"link set dev {device} up",
    ]
