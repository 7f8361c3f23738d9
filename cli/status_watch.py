"""`baton status --watch`: the same figures once a second, until Ctrl-C."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cli.failures import for_people
from cli.status_table import status_lines
from client import AdminClient, BatonClientError, ClusterStatus, RetryPolicy

PERIOD_S = 1.0
TIMEOUT_S = 2.0
NOTICE_S = 5.0
"""How long it shows that the router is back."""


@dataclass(frozen=True, slots=True)
class Frame:
    """`status` is the newest there is, None before the first; `notice` is empty while all is usual."""

    status: ClusterStatus | None
    notice: str
    is_current: bool


def watch_status(admin_target: str, as_json: bool) -> int:
    """Shows frame after frame: in place at a terminal, one after another elsewhere. Ctrl-C ends it with exit code 0."""
    console = Console()
    with AdminClient(admin_target, retry=RetryPolicy(attempts=1), timeout_s=TIMEOUT_S) as admin:
        shown = frames(admin.status, f"{admin_target} (admin port)", time.monotonic, time.sleep)
        try:
            if as_json:
                _show_json(shown)
            elif console.is_terminal:
                with Live(console=console, auto_refresh=False) as live:
                    for frame in shown:
                        live.update(Text("\n".join(frame_lines(frame, console.width))), refresh=True)
            else:
                for frame in shown:
                    print("\n".join(frame_lines(frame, console.width)), end="\n\n", flush=True)
        except KeyboardInterrupt:
            return 0
    return 0


def frames(
    snapshot: Callable[[], ClusterStatus], target: str, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[Frame]:
    """One in each PERIOD_S, without end. A router that does not answer is asked again in the next."""
    status: ClusterStatus | None = None
    lost_s: float | None = None
    notice, notice_ends_s = "", 0.0
    while True:
        began_s = clock()
        try:
            status = snapshot()
        except BatonClientError as error:
            lost_s = began_s if lost_s is None else lost_s
            message = for_people(error, target).message
            yield Frame(status, f"{message} (lost for {clock() - lost_s:.0f} s, asking every second)", is_current=False)
        else:
            if lost_s is not None:
                notice, notice_ends_s = f"{target} answers again, after {clock() - lost_s:.0f} s", clock() + NOTICE_S
                lost_s = None
            yield Frame(status, notice if clock() < notice_ends_s else "", is_current=True)
        sleep(max(0.0, began_s + PERIOD_S - clock()))


def frame_lines(frame: Frame, width: int) -> list[str]:
    """Old figures are marked as such."""
    lines = [frame.notice] if frame.notice else []
    if frame.status is not None:
        lines += [] if frame.is_current else ["The last figures:"]
        lines += status_lines(frame.status, width)
    return lines


def _show_json(shown: Iterator[Frame]) -> None:
    """One object per frame; {"error": ...} while the router does not answer."""
    for frame in shown:
        content = asdict(frame.status) if frame.is_current and frame.status is not None else {"error": frame.notice}
        print(json.dumps(content), flush=True)
