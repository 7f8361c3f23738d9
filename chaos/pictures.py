"""Pictures of a run as SVG text. Pure: what was seen in, text out. Every colour reads on white and on black."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from xml.sax.saxutils import escape

from chaos.faults import FaultKind
from chaos.gaps import Injected
from chaos.history import Behaviour, History
from chaos.watch import Look
from cli.bench.picture import COLOURS, FONT, GREY, Curve, LineChart, draw_lines
from cli.bench.scale import Axis
from cli.bench.statistics import percentile

WIDTH, LEFT, RIGHT, TOP = 1200, 110, 16, 26
ROW, FAULT_ROW = 5, 15
SHOWN_S = 240.0  # of a timeline: more could not be told apart
STALL_S = 0.5  # a pause that is drawn
RED = COLOURS[7]
OF_KIND = dict(zip(FaultKind, (*COLOURS[:7], "#5c9e31", "#d06a9c", "#4b69c6"), strict=True))
POINTS = 160


def draw_timeline(injected: Sequence[Injected], histories: Sequence[History], began_s: float, title: str) -> str:
    """Faults by target above, a row for each stream that overlaps nobody else's below; pauses are red."""
    end_s = min(
        SHOWN_S,
        max([each.healed_s for each in injected] + [each.closed_s or each.began_s for each in histories]) - began_s,
    )
    scale = (WIDTH - LEFT - RIGHT) / max(end_s, 1.0)

    def x(at_s: float) -> float:
        return LEFT + scale * min(max(at_s - began_s, 0.0), end_s)

    targets = sorted({each.fault.target or "clocks" for each in injected})
    parts, y = [], float(TOP)
    for target in targets:
        parts.append(_text(LEFT - 8, y + 10, target, "end"))
        parts.append(f'<path d="M{LEFT} {y + 6:.0f} H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.25"/>')
        for each in injected:
            if (each.fault.target or "clocks") == target and each.at_s - began_s < end_s:
                width = max(3.0, x(each.healed_s) - x(each.at_s))
                parts.append(
                    f'<rect x="{x(each.at_s):.1f}" y="{y:.0f}" width="{width:.1f}" height="11" rx="2" '
                    f'fill="{OF_KIND[each.fault.kind]}"><title>{escape(f"{each.fault}: {each.proof}")}</title></rect>'
                )
        y += FAULT_ROW
    y += 8
    lanes = _lanes([each for each in histories if each.began_s - began_s < end_s])
    parts.append(_text(LEFT - 8, y + 10, "streams", "end"))
    for lane in lanes:
        for history in lane:
            parts += _stream(history, x, y)
        y += ROW + 1
    parts += _seconds(end_s, scale, y)
    legend, height = _legend(sorted({each.fault.kind for each in injected}), y + 36)
    return _document(title, [*parts, *legend], height)


def draw_gaps(gaps: Mapping[str, Sequence[float]], title: str) -> str:
    """The share of streams that stood still for at most so long. Raises: ValueError without a gap."""
    curves = []
    for name, seconds in gaps.items():
        shares = [(percentile(seconds, share), float(share)) for share in range(101)] if seconds else []
        curves.append(Curve(name, tuple(shares), is_dashed=True))
    return draw_lines(LineChart(title, Axis("seconds without a token"), Axis("% of streams"), tuple(curves)))


def draw_memory(looks: Sequence[Look], began_s: float, title: str) -> str:
    """Resident memory of each process, over the lives that it had. Raises: ValueError without a look."""
    curves = []
    for name in sorted({look.name for look in looks}):
        own = [look for look in looks if look.name == name]
        step = max(1, len(own) // POINTS)
        points = tuple(((look.at_s - began_s) / 60, look.rss_bytes / 2**20) for look in own[::step])
        curves.append(Curve(name, points, is_dashed=True))
    return draw_lines(LineChart(title, Axis("minutes"), Axis("MiB resident"), tuple(curves)))


def _lanes(histories: Sequence[History]) -> list[list[History]]:
    lanes: list[list[History]] = []
    for history in sorted(histories, key=lambda each: each.began_s):
        lane = next((lane for lane in lanes if (lane[-1].closed_s or history.began_s + 1) <= history.began_s), None)
        if lane is None:
            lanes.append([history])
        else:
            lane.append(history)
    return lanes


def _stream(history: History, x: Callable[[float], float], y: float) -> list[str]:
    end_s = history.closed_s or history.began_s
    colour = RED if history.failure else GREY if history.behaviour is Behaviour.CANCELS else COLOURS[2]
    name = escape(f"stream {history.number}, {history.case}, {history.behaviour}: {history.failure or 'OK'}")
    width = max(1.0, x(end_s) - x(history.began_s))
    begin = x(history.began_s)
    parts = [
        f'<rect x="{begin:.1f}" y="{y:.0f}" width="{width:.1f}" height="{ROW}" fill="{colour}" fill-opacity="0.75">'
        f"<title>{name}</title></rect>"
    ]
    for before, after in pairwise([history.began_s, *history.token_times, end_s]):
        if after - before > STALL_S:
            parts.append(
                f'<path d="M{x(before):.1f} {y + ROW / 2:.1f} H{x(after):.1f}" stroke="{RED}" stroke-width="2"/>'
            )
    return parts


def _seconds(end_s: float, scale: float, y: float) -> list[str]:
    step = next(step for step in (1, 2, 5, 10, 20, 50) if end_s / step <= 24)
    parts = [f'<path d="M{LEFT} {y + 4:.0f} H{WIDTH - RIGHT}" stroke="{GREY}"/>']
    for second in range(0, int(end_s) + 1, step):
        parts.append(_text(LEFT + scale * second, y + 18, f"{second} s", "middle"))
    return parts


def _legend(kinds: Sequence[FaultKind], y: float) -> tuple[list[str], float]:
    parts, x = [], float(LEFT)
    entries = [(OF_KIND[kind], kind.value) for kind in kinds]
    entries += [
        (COLOURS[2], "stream"),
        (RED, f"more than {STALL_S:g} s without a token"),
        (GREY, "given up by its client"),
    ]
    for colour, name in entries:
        width = 30 + 7 * len(name)
        if x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + 18
        parts.append(f'<path d="M{x:.0f} {y - 4:.0f} h14" stroke="{colour}" stroke-width="8"/>')
        parts.append(_text(x + 19, y, name, "start"))
        x += width
    return parts, y + 14


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _document(title: str, parts: Sequence[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="{FONT}" '
        f'font-size="11" fill="{GREY}"><text x="{LEFT}" y="15" font-size="13">{escape(title)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
