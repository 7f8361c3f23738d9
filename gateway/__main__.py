""".venv/bin/python -m baton.gateway: the public endpoint, gRPC and HTTP, until SIGTERM."""

import sys

from baton.service.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    from baton.gateway.config import GatewayConfig
    from baton.gateway.process import GatewayProcess
    from baton.router.process import run_router

    sys.exit(run_router(".venv/bin/python -m baton.gateway", GatewayConfig, GatewayProcess))
