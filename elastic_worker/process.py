"""The process of a worker that can change its role: loads the model once, and announces the role that it has now."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable

from elastic_worker.config import ElasticConfig
from elastic_worker.worker import ElasticWorker
from engine.check_kernels import ForeignKernelsError, require_own_kernels
from engine.kv_memory import LargestStep
from engine.model_config import ModelError
from engine.parallel.collectives import RankLost
from engine.prepare import PreparedModel
from prefill_worker.worker import LOST, PROMPTS_AT_ONCE, SWITCH_INTERVAL_S, WRONG_CONFIGURATION
from service.affinity import pin_process
from service.logs import configure_logging
from service.server import run, serve
from service.worker_process import WorkerProcess, take_worker_epoch
from worker.model import prepare

logger = logging.getLogger(__name__)
MakeWorker = Callable[[ElasticConfig, PreparedModel, int, Callable[[], Awaitable[int]]], ElasticWorker]


def main(config: ElasticConfig, make_worker: MakeWorker = ElasticWorker) -> int:
    """Returns the exit code: 2 for an error that a restart would not fix."""
    configure_logging(config.worker_id, config.log_format, config.log_level)
    try:
        require_own_kernels()
        return _run(config, make_worker)
    except (ForeignKernelsError, ModelError) as error:
        logger.critical("%s", error)
        return WRONG_CONFIGURATION
    except RankLost as error:
        logger.critical("%s", error)
        return LOST


def _run(config: ElasticConfig, make_worker: MakeWorker) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if config.cores is not None:
        # the engine's thread goes back to `cores` alone; the event loop and the copying stay off them where they can
        pin_process(config.cores | (config.transfer_cores or frozenset()))
    return run(_main(config, make_worker))


async def _main(config: ElasticConfig, make_worker: MakeWorker) -> int:
    sequences = config.max_sequences
    step = LargestStep(max(config.chunk_tokens, sequences), max(sequences, min(config.chunk_tokens, PROMPTS_AT_ONCE)))
    prepared = await asyncio.to_thread(prepare, config, step)
    logger.info("%s", prepared)
    epoch = await take_worker_epoch(config)
    worker = make_worker(config, prepared, epoch, lambda: take_worker_epoch(config))
    process = WorkerProcess(config, worker, epoch)
    worker.on_role = process.announce
    return await serve(process, grace_s=config.drain_s, stall_s=config.stall_s)
