"""The limit of open files, raised by every process at its start."""

import subprocess
import sys

LIMITS = """
import resource
from baton.process.serving.server import run

async def main():
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    return 0

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
run(main())
"""


def test_run_raises_the_soft_limit_to_the_hard_one() -> None:
    result = subprocess.run([sys.executable, "-P", "-c", LIMITS], capture_output=True, text=True, check=True)

    assert result.stdout.split() == ["300", "300"]
