"""Which tests a run of pytest skipped, and why."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

GPU_REASONS = frozenset({"needs a GPU", "needs two GPUs"})


def noting_skips(report: Path) -> list[str]:
    """Arguments that have pytest write the file for `read_skips`."""
    return [f"--junit-xml={report}"]


def read_skips(report: Path) -> Counter[str]:
    """Skipped tests by reason; none where pytest ended before it wrote a report."""
    if not report.exists():
        return Counter()
    skipped = ElementTree.parse(report).iter("skipped")
    return Counter(each.get("message", "") for each in skipped if each.get("type") == "pytest.skip")


def avoidable(skips: Mapping[str, int]) -> list[str]:
    """Reasons that another machine without a GPU would not have had."""
    return sorted(skips.keys() - GPU_REASONS)


def summary(skips: Mapping[str, int]) -> str:
    """One line, the most frequent reason first."""
    by_number = sorted(skips.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} ({reason})" for reason, number in by_number) or "none"
