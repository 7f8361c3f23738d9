"""One worker whose role may change: `.venv/bin/python -m baton.elastic_worker --role prefill|decode`."""

import gc
import sys

from baton.process.serving.signals import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    gc.disable()  # all that is imported stays: looking through it again and again would take a fifth of the time
    from baton.elastic_worker.config import ElasticConfig
    from baton.elastic_worker.elastic import main
    from baton.process.config import read_config_or_exit

    config = read_config_or_exit(ElasticConfig, ".venv/bin/python -m baton.elastic_worker")
    gc.enable()
    sys.exit(main(config))
