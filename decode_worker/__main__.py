"""Run one decode worker until SIGTERM: `.venv/bin/python -m baton.decode_worker`."""

import sys

from baton.worker.main import start

if __name__ == "__main__":
    sys.exit(start("baton.decode_worker", "role", "DecodeConfig"))
