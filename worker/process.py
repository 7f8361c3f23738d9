"""Worker process of any role: prepare the model, take an epoch, serve until a signal."""

import asyncio
import logging
import sys
from collections.abc import Callable

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.memory import LargestStep
from baton.engine.on_device import NoMemoryLeft
from baton.engine.parallel.collectives import RankLost
from baton.engine.prepare import PreparedModel
from baton.kvtransfer.transport import SharedMemoryUnavailable
from baton.process.affinity import lower_priority, pin_process
from baton.process.config import log_notices
from baton.process.serving.exit_codes import ExitCode
from baton.process.serving.server import run, serve
from baton.process.telemetry.logs import configure_logging
from baton.process.worker_config import WorkerConfig
from baton.process.worker_process import Worker, WorkerProcess, take_worker_epoch
from baton.worker.host import prepare
from baton.worker.transfer.pool import prepare_groups

logger = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.0005  # longest wait of the engine's thread for a busy event loop
PROMPTS_AT_ONCE = 64  # prompts that end in one step, when memory is measured
MakeWorker = Callable[[PreparedModel, int], Worker]
"""Factory of a worker from the prepared model and the epoch."""


def run_worker(config: WorkerConfig, step: LargestStep, make_worker: MakeWorker, nice: int = 0) -> int:
    """Run a worker; return the exit code. `nice`: nice value of the process."""
    configure_logging(config.worker_id, config.log_format, config.log_level)
    log_notices(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    prepare_groups(config)
    try:
        return run(_serve(config, step, make_worker, nice))
    except NoMemoryLeft as error:
        logger.critical("%s", error)
        return ExitCode.OUT_OF_MEMORY
    except (ModelError, SharedMemoryUnavailable) as error:
        logger.critical("%s", error)
        return ExitCode.WRONG_CONFIGURATION
    except RankLost as error:
        logger.critical("%s", error)
        return ExitCode.FAILED


async def _serve(config: WorkerConfig, step: LargestStep, make_worker: MakeWorker, nice: int) -> int:
    if config.cores is not None:
        # the engine's thread goes back to `cores` alone; the event loop and the copying stay off them where they can
        pin_process(config.cores | (config.transfer_cores or frozenset()))
    if nice:
        lower_priority(nice)
    prepared = await asyncio.to_thread(prepare, config, step, nice)
    logger.info("%s", prepared)
    epoch = await take_worker_epoch(config)
    worker = make_worker(prepared, epoch.number)
    process = WorkerProcess(config, worker, epoch)
    worker.on_role = process.announce
    return await serve(process, grace_s=config.drain_s, stall_s=config.stall_s, run_id=config.run_id)
