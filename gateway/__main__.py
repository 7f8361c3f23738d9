""".venv/bin/python -m baton.gateway: the public endpoint, gRPC and HTTP, until SIGTERM."""

import sys

from baton.gateway.config import GatewayConfig
from baton.gateway.process import GatewayProcess
from baton.router.process import run_router

if __name__ == "__main__":
    sys.exit(run_router(".venv/bin/python -m baton.gateway", GatewayConfig, GatewayProcess))
