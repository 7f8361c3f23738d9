"""A worker whose steps take as long as those of a larger model on a device of its own, while the CPU is free.

    .venv/bin/python -m baton.lab.benchmarks.cluster.paced_worker --decode-step-ms 8 --prefill-token-ms 0.25
                                              [the flags of baton.worker]

It computes its tiny model as ever and then waits: so two cores carry a cluster of which no worker is in another's way.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    gc.disable()

from baton.elastic_worker.config import ElasticConfig
from baton.elastic_worker.elastic import ElasticWorker, main
from baton.engine.request import Plan
from baton.engine.runner.launched import Launched
from baton.process.config import Field, read_config_or_exit
from baton.process.registry.membership import Epoch


class PacedConfig(ElasticConfig):
    """A worker that can change its role, with steps of a given length."""

    decode_step_ms: float = Field(8.0, ge=0, description="least time of any step")
    prefill_token_ms: float = Field(0.25, ge=0, description="least time for each token beyond one of a sequence")


class PacedWorker(ElasticWorker):
    async def start(
        self, on_fault: Callable[[BaseException], None], on_role: Callable[[Epoch], None] = lambda epoch: None
    ) -> None:
        runner: Any = (await self.host.load(on_fault)).runner
        config = self._config
        if isinstance(config, PacedConfig):
            runner.launch = paced(runner.launch, config.decode_step_ms / 1e3, config.prefill_token_ms / 1e3)
        await super().start(on_fault, on_role)


def paced(launch: Callable[..., Launched], step_s: float, token_s: float) -> Callable[..., Launched]:
    def launch_and_wait(plan: Plan, after: Launched | None = None) -> Launched:
        due_s = time.monotonic() + max(step_s, token_s * (plan.tokens - len(plan.chunks)))
        launched = launch(plan, after)
        time.sleep(max(0.0, due_s - time.monotonic()))
        return launched

    return launch_and_wait


if __name__ == "__main__":
    given = read_config_or_exit(PacedConfig, ".venv/bin/python -m baton.lab.benchmarks.cluster.paced_worker")
    gc.enable()
    sys.exit(main(given, PacedWorker))
