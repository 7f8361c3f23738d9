"""python -m prefill_worker: one prefill worker, until SIGTERM."""

import sys

from prefill_worker.config import PrefillConfig
from prefill_worker.worker import main
from service.config import read_config_or_exit

if __name__ == "__main__":
    sys.exit(main(read_config_or_exit(PrefillConfig, "python -m prefill_worker")))
