""".venv/bin/python -m baton.prefill_worker: one prefill worker, until SIGTERM."""

import gc
import sys

from baton.process.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    gc.disable()  # all that is imported stays: looking through it again and again would take a fifth of the time
    from baton.prefill_worker.config import PrefillConfig
    from baton.prefill_worker.role import main
    from baton.process.config import read_config_or_exit

    config = read_config_or_exit(PrefillConfig, ".venv/bin/python -m baton.prefill_worker")
    gc.enable()
    sys.exit(main(config))
