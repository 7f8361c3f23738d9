"""Run one prefill worker until SIGTERM: `.venv/bin/python -m baton.prefill_worker`."""

import sys

from baton.worker.main import start

if __name__ == "__main__":
    sys.exit(start("baton.prefill_worker", "role", "PrefillConfig"))
