""".venv/bin/python -m baton.router: the public endpoint, until SIGTERM."""

import sys

from baton.service.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    from baton.router.config import RouterConfig
    from baton.router.process import RouterProcess, run_router

    sys.exit(run_router(".venv/bin/python -m baton.router", RouterConfig, RouterProcess))
