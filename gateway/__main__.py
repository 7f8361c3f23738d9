""".venv/bin/python -m baton.gateway: the public endpoint, gRPC and HTTP, until SIGTERM."""

import sys

from baton.gateway.config import GatewayConfig
from baton.gateway.process import GatewayProcess
from baton.router.process import SWITCH_INTERVAL_S
from baton.service.affinity import pin_process
from baton.service.config import read_config_or_exit
from baton.service.serving.server import run, serve
from baton.service.telemetry.logs import configure_logging
from baton.service.telemetry.spans import open_telemetry


async def main(config: GatewayConfig) -> int:
    telemetry = open_telemetry("router", config.otlp_endpoint, config.trace_file)
    return await serve(GatewayProcess(config, telemetry), grace_s=config.drain_s)


if __name__ == "__main__":
    gateway_config = read_config_or_exit(GatewayConfig, ".venv/bin/python -m baton.gateway")
    configure_logging("router", gateway_config.log_format, gateway_config.log_level)
    if gateway_config.cores is not None:
        pin_process(gateway_config.cores)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sys.exit(run(main(gateway_config)))
