""".venv/bin/python -m baton.router: the public endpoint, gRPC and HTTP, until SIGTERM."""

import sys

from baton.process.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    from baton.router.http.process import HttpRouterProcess
    from baton.router.process import run_router

    sys.exit(run_router(".venv/bin/python -m baton.router", HttpRouterProcess))
