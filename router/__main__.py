""".venv/bin/python -m baton.router: the public endpoint, until SIGTERM."""

import sys

from baton.router.config import RouterConfig
from baton.router.process import SWITCH_INTERVAL_S, RouterProcess
from baton.service.affinity import pin_process
from baton.service.config import read_config_or_exit
from baton.service.serving.server import run, serve
from baton.service.telemetry.logs import configure_logging
from baton.service.telemetry.spans import open_telemetry


async def main(config: RouterConfig) -> int:
    telemetry = open_telemetry("router", config.otlp_endpoint, config.trace_file)
    return await serve(RouterProcess(config, telemetry), grace_s=config.drain_s)


if __name__ == "__main__":
    router_config = read_config_or_exit(RouterConfig, ".venv/bin/python -m baton.router")
    configure_logging("router", router_config.log_format, router_config.log_level)
    if router_config.cores is not None:
        pin_process(router_config.cores)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sys.exit(run(main(router_config)))
