"""Entry point of the workers' commands: installs signal handlers before it imports the worker's modules."""

import gc
from importlib import import_module

from baton.process.serving.signals import prepare_signals


def start(package: str, module: str, config_name: str) -> int:
    """Import a worker, read its configuration and run it; return the exit code.

    `module` of `package` must have the configuration class `config_name` and a function `main` that runs the worker.
    """
    prepare_signals()
    gc.disable()  # imported objects stay alive; collections would take 20 % of the import time
    from baton.process.config import read_config_or_exit

    worker = import_module(f"{package}.{module}")
    config = read_config_or_exit(getattr(worker, config_name), f".venv/bin/python -m {package}")
    gc.enable()
    return int(worker.main(config))
