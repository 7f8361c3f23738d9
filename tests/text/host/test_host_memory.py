"""Memory of the machine and of control groups, read from imitated files."""

from pathlib import Path

import pytest

from baton.text.host.memory import available_bytes, shortage, total_bytes

GIB = 1 << 30


def describe(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    described = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB >> 10} kB\n", "proc/self/cgroup": cgroup}
    for name, text in (described | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_total_bytes_without_control_groups_is_the_machines(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) == total_bytes(describe(tmp_path, "0::/a\n", {})) > GIB // 4
    assert available_bytes(tmp_path) == 8 * GIB


@pytest.mark.parametrize(
    ("cgroup", "folder", "names"),
    [
        ("0::/pod/own\n", "sys/fs/cgroup/pod", ("memory.max", "memory.current", "inactive_file")),
        ("0::/\n", "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
        (
            "3:cpu,memory:/docker/id\n0::/other\n",
            "sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2, above", "version 2, in a container", "version 1"],
)
def test_limits_of_control_groups_bound_total_and_available_bytes(
    tmp_path: Path, cgroup: str, folder: str, names: tuple[str, str, str]
) -> None:
    limit, used, droppable = names
    stat = f"anon 5\n{droppable} {GIB // 16}\n"
    files = {limit: str(GIB // 8), used: str(GIB // 8 - 1), "memory.stat": stat}
    root = describe(tmp_path, cgroup, {f"{folder}/{name}": text for name, text in files.items()})
    assert total_bytes(root) == GIB // 8
    assert available_bytes(root) == GIB // 16 + 1


def test_control_group_without_a_limit_bounds_nothing(tmp_path: Path) -> None:
    files = {"memory.max": "max\n", "memory.current": "1\n", "memory.stat": "inactive_file 0\n"}
    root = describe(tmp_path, "0::/\n", {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert available_bytes(root) == 8 * GIB


def test_shortage_names_amounts_total_and_the_largest_allowed() -> None:
    assert shortage({"pool": 2 * GIB, "weights": 6 * GIB}, 8 * GIB) == ""
    assert shortage({"pool": 9 * GIB, "weights": GIB, "none": 0}, 8 * GIB) == (
        "pool of 9 GiB and weights of 1 GiB do not fit into the 8 GiB of memory here; pool may be 7 GiB at most"
    )
    assert shortage({"pool": 5 * GIB, "weights": 4 * GIB}, 3 * GIB).endswith("take a smaller model or fewer workers")
