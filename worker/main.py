"""Entry point of the workers' commands, which imports their modules with signal handlers in place."""

import gc
from importlib import import_module

from baton.process.serving.signals import prepare_signals


def start(package: str, module: str, config_name: str) -> int:
    """Import a worker, read its configuration and run it; return the exit code.

    `module` of `package` has the class `config_name` of the configuration and `main`, which runs the worker.
    """
    prepare_signals()
    gc.disable()  # imported objects stay alive; collections would take 20 % of the time
    from baton.process.config import read_config_or_exit

    worker = import_module(f"{package}.{module}")
    config = read_config_or_exit(getattr(worker, config_name), f".venv/bin/python -m {package}")
    gc.enable()
    return int(worker.main(config))
