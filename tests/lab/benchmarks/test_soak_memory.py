"""How a soak looks at memory."""

import os
import subprocess
import sys

from baton.lab.benchmarks.clients.run import MemoryWatch, children, growth_mib, own_mib

HOLDS = "import sys; held = bytearray(64 << 20); print('held', flush=True); sys.stdin.read()"


def test_growth_is_from_the_second_quarter_to_the_last() -> None:
    assert growth_mib([10.0, 90.0, 100.0, 100.0, 100.0, 100.0, 110.0, 111.0]) == 10.5
    assert growth_mib([100.0 + number for number in range(40)]) == 20.0
    assert growth_mib([1.0, 500.0]) == 0.0


def test_children_are_found_and_what_they_hold_is_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        assert child.pid in children(os.getpid()).values()
        with MemoryWatch({"child": child.pid}, every_s=60.0) as watch:
            pass
        child.communicate()
    assert watch.samples["child"][0] > 64
    assert own_mib(child.pid) is None
