""".venv/bin/python -m decode_worker: one decode worker, until SIGTERM."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # all that is imported stays: looking through it again and again would take a fifth of the time
    from decode_worker.config import DecodeConfig
    from decode_worker.worker import main
    from service.config import read_config_or_exit

    config = read_config_or_exit(DecodeConfig, ".venv/bin/python -m decode_worker")
    gc.enable()
    sys.exit(main(config))
