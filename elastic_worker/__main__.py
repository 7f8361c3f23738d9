""".venv/bin/python -m elastic_worker: one worker of a role that may change, until SIGTERM."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # all that is imported stays: looking through it again and again would take a fifth of the time
    from elastic_worker.config import ElasticConfig
    from elastic_worker.process import main
    from service.config import read_config_or_exit

    config = read_config_or_exit(ElasticConfig, ".venv/bin/python -m elastic_worker")
    gc.enable()
    sys.exit(main(config))
