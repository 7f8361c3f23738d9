""".venv/bin/python -m prefill_worker: one prefill worker, until SIGTERM."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # all that is imported stays: looking through it again and again would take a fifth of the time
    from prefill_worker.config import PrefillConfig
    from prefill_worker.worker import main
    from service.config import read_config_or_exit

    config = read_config_or_exit(PrefillConfig, ".venv/bin/python -m prefill_worker")
    gc.enable()
    sys.exit(main(config))
