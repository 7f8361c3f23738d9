"""Where a bundle gets its facts: processes of Baton on this machine, the last run of `baton up`, and addresses."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.launch.run_record import RunRecord, newest_run

PROC = Path("/proc")
MODULES = frozenset({"router", "prefill_worker", "decode_worker", "elastic_worker"})
DEFAULT_ADMIN = "127.0.0.1:50052"
DEFAULT_HTTP = "127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class BatonProcess:
    """One that runs here, under this user. `arguments` and `environment` may hold secrets: they are never written."""

    pid: int
    module: str
    arguments: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] | None = field(repr=False)  # None: it may not be read

    @property
    def name(self) -> str:
        return self.argument("--worker-id") or self.module

    def argument(self, flag: str) -> str | None:
        """Its value as it was given; of the variable where there is no flag."""
        for place, argument in enumerate(self.arguments[:-1]):
            if argument == flag:
                return self.arguments[place + 1]
        variable = "BATON_" + flag.removeprefix("--").replace("-", "_").upper()
        return (self.environment or {}).get(variable)


@dataclass(frozen=True, slots=True)
class Sources:
    runtime: Path
    run: RunRecord | None  # the last of `baton up`, over or not
    processes: Sequence[BatonProcess]
    admin_targets: Sequence[str]  # host:port
    http_targets: Sequence[str]  # host:port
    environment: Mapping[str, str] = field(repr=False)  # of this command
    proc: Path = PROC


def find_sources(
    runtime: Path,
    environment: Mapping[str, str],
    admin: Sequence[str] = (),
    http: Sequence[str] = (),
    proc: Path = PROC,
) -> Sources:
    """`admin` and `http`: addresses that were given. Else those of routers that run here, then of the last run."""
    run = newest_run(runtime)
    processes = find_processes(proc)
    routers = [each for each in processes if each.module == "router"]
    admins = [_address(each, "admin", DEFAULT_ADMIN) for each in routers]
    https = [_address(each, "http", DEFAULT_HTTP) for each in routers]
    return Sources(
        runtime,
        run,
        processes,
        admin or admins or (run.admin_targets if run else ()) or (DEFAULT_ADMIN,),
        http or https or (run.http_targets if run else ()) or (DEFAULT_HTTP,),
        environment,
        proc,
    )


def _address(process: BatonProcess, prefix: str, default: str) -> str:
    """Where a router listens, as it was given; one that took a free port is only found by the last run."""
    host, _, port = default.rpartition(":")
    given = process.argument(f"--{prefix}-host") or host
    reached = host if given in ("0.0.0.0", "::", "localhost") else given
    bracketed = f"[{reached}]" if ":" in reached else reached
    return f"{bracketed}:{process.argument(f'--{prefix}-port') or port}"


def find_processes(proc: Path = PROC) -> list[BatonProcess]:
    """By pid. Of other users' processes nothing is read."""
    found = []
    for folder in sorted((each for each in proc.glob("[0-9]*")), key=lambda each: int(each.name)):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            command = _texts(folder / "cmdline")
        except OSError:
            continue  # it has ended
        module = _module_of(command)
        if module is not None:
            arguments = tuple(command[command.index("-m") + 2 :])
            found.append(BatonProcess(int(folder.name), module, arguments, _environment(folder)))
    return found


def _module_of(command: Sequence[str]) -> str | None:
    """`router` of `python -P -m baton.router ...`."""
    if "-m" not in command[:-1]:
        return None
    package, _, module = command[command.index("-m") + 1].partition(".")
    return module if package == "baton" and module in MODULES else None


def _environment(folder: Path) -> Mapping[str, str] | None:
    try:
        pairs = [text.partition("=") for text in _texts(folder / "environ")]
    except OSError:
        return None
    return {name: value for name, _, value in pairs if name}


def _texts(path: Path) -> list[str]:
    """Raises: OSError."""
    return [text.decode(errors="replace") for text in path.read_bytes().split(b"\0")[:-1]]
