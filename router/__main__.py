"""Run one router, with its gRPC and HTTP endpoints, until SIGTERM: `.venv/bin/python -m baton.router`."""

import sys

from baton.process.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    from baton.router.http.process import HttpRouterProcess
    from baton.router.process import run_router

    sys.exit(run_router(".venv/bin/python -m baton.router", HttpRouterProcess))
