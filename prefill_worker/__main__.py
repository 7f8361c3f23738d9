""".venv/bin/python -m baton.prefill_worker: one prefill worker, until SIGTERM."""

import sys

from baton.worker.main import start

if __name__ == "__main__":
    sys.exit(start("baton.prefill_worker", "role", "PrefillConfig"))
