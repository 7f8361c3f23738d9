""".venv/bin/python -m baton.worker --role prefill|decode: one worker of a role that may change, until SIGTERM."""

import gc
import sys

from baton.service.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    gc.disable()  # all that is imported stays: looking through it again and again would take a fifth of the time
    from baton.service.config import read_config_or_exit
    from baton.worker.config import ElasticConfig
    from baton.worker.elastic import main

    config = read_config_or_exit(ElasticConfig, ".venv/bin/python -m baton.worker")
    gc.enable()
    sys.exit(main(config))
