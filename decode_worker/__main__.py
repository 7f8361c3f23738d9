"""python -m decode_worker: one decode worker, until SIGTERM."""

import sys

from decode_worker.config import DecodeConfig
from decode_worker.worker import main
from service.config import read_config_or_exit

if __name__ == "__main__":
    sys.exit(main(read_config_or_exit(DecodeConfig, "python -m decode_worker")))
