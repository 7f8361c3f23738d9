""".venv/bin/python -m baton.decode_worker: one decode worker, until SIGTERM."""

import gc
import sys

from baton.process.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    gc.disable()  # all that is imported stays: looking through it again and again would take a fifth of the time
    from baton.decode_worker.config import DecodeConfig
    from baton.decode_worker.role import main
    from baton.process.config import read_config_or_exit

    config = read_config_or_exit(DecodeConfig, ".venv/bin/python -m baton.decode_worker")
    gc.enable()
    sys.exit(main(config))
