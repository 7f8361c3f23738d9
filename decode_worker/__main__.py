""".venv/bin/python -m baton.decode_worker: one decode worker, until SIGTERM."""

import gc
import sys

from baton.service.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    gc.disable()  # all that is imported stays: looking through it again and again would take a fifth of the time
    from baton.service.config import read_config_or_exit
    from baton.worker.config import DecodeConfig
    from baton.worker.decode.role import main

    config = read_config_or_exit(DecodeConfig, ".venv/bin/python -m baton.decode_worker")
    gc.enable()
    sys.exit(main(config))
