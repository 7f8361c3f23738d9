"""Run one elastic worker until SIGTERM: `.venv/bin/python -m baton.elastic_worker --role prefill|decode`."""

import sys

from baton.worker.main import start

if __name__ == "__main__":
    sys.exit(start("baton.elastic_worker", "elastic", "ElasticConfig"))
