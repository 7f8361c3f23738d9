""".venv/bin/python -m baton.router: the public endpoint, until SIGTERM."""

import sys

from baton.router.config import RouterConfig
from baton.router.process import RouterProcess, run_router

if __name__ == "__main__":
    sys.exit(run_router(".venv/bin/python -m baton.router", RouterConfig, RouterProcess))
