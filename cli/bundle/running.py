"""The processes: how each is configured and what it uses, and what the routers say about all of them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from baton.cli.bundle.archive import Missing, Piece
from baton.cli.bundle.redaction import shown_flags, shown_variables
from baton.cli.bundle.sources import Sources
from baton.cli.connection import admin_key, credentials, fetch_text, for_people
from baton.client import AdminClient, BatonClientError, RetryPolicy
from baton.launch import CommandFailed

CALL_S = 3.0
_STATUS_FIELDS: tuple[str, ...] = ("State", "VmRSS", "VmHWM", "VmSwap", "RssShmem", "Threads", "Cpus_allowed_list")
_STATUS_FIELDS += ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_TICKS_S = os.sysconf("SC_CLK_TCK")
_METRICS = ("vllm:", "baton:", "python_", "process_", "gen_ai_", "http_")


def configuration(sources: Sources) -> Iterator[Piece | Missing]:
    """Of living processes their own, of the last run what `up` wrote of it: that has the dead ones too."""
    running = [
        {
            "name": each.name,
            "pid": each.pid,
            "module": each.module,
            "flags": shown_flags(each.arguments),
            "variables": None if each.environment is None else shown_variables(each.environment),
        }
        for each in sources.processes
    ]
    run = sources.run
    last = None if run is None else {"flags": run.flags, "variables": run.variables, "pid_of_up": run.pid}
    found = {
        "running": running,
        "last_run_of_up": last,
        "variables_of_this_shell": shown_variables(sources.environment),
    }
    yield Piece("configuration.json", "flags and variables of each process, without secrets", found)
    if run is None:
        yield Missing("no run of `baton up` is recorded here")


def processes(sources: Sources) -> Iterator[Piece | Missing]:
    found = [{"name": each.name, "pid": each.pid, **usage(sources.proc / str(each.pid))} for each in sources.processes]
    if found:
        yield Piece("processes.json", "memory, threads, files and CPU time of each process of Baton here", found)
    else:
        yield Missing("no process of Baton runs on this machine under this user")
    yield from _gone(sources)


def _gone(sources: Sources) -> Iterator[Missing]:
    """Processes of the last run that are no more, while `up` itself or others of it live."""
    if sources.run is None or not sources.processes:
        return
    here = {each.name for each in sources.processes}
    for name, flags in sources.run.flags.items():
        if flags.get("--worker-id") is not None and name not in here:
            yield Missing(f"{name} of the last run does not run")
    routers = sum("--worker-id" not in flags for flags in sources.run.flags.values())
    alive = sum(each.module == "router" for each in sources.processes)
    if alive < routers:
        yield Missing(f"{alive} of the {routers} routers of the last run are running")


def usage(folder: Path) -> dict[str, object]:
    """From a folder of /proc; what cannot be read is left out."""
    found: dict[str, object] = {}
    try:
        rows = (row.partition(":") for row in (folder / "status").read_text(errors="replace").splitlines())
        found |= {name: value.strip() for name, _, value in rows if name in _STATUS_FIELDS}
        # Behind the name in brackets, which may contain anything: field 14 and 15 of proc(5) are 11 and 12 here.
        numbers = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        found["cpu_s"] = (int(numbers[11]) + int(numbers[12])) / _TICKS_S
        found["nice"] = int(numbers[16])
        found["open_files"] = sum(1 for _ in (folder / "fd").iterdir())
    except (OSError, IndexError, ValueError) as error:
        found["incomplete"] = type(error).__name__  # it has just ended
    return found


def status(sources: Sources) -> Iterator[Piece | Missing]:
    for number, target in enumerate(sources.admin_targets):
        try:
            key, once = admin_key(target), RetryPolicy(attempts=1)
            with AdminClient(target, retry=once, timeout_s=CALL_S, api_key=key) as admin:
                found = asdict(admin.status())
        except BatonClientError as error:
            yield Missing(for_people(error, f"{target} (admin port)").message)
            continue
        what = f"what the router at {target} knows of workers, requests and latency, as `baton status --json`"
        yield Piece(f"status-{number}.json", what, found)


def metrics(sources: Sources) -> Iterator[Piece | Missing]:
    for number, target in enumerate(sources.http_targets):
        try:
            text = fetch_text(target, "/metrics", credentials())
        except CommandFailed as error:
            yield Missing(str(error))
            continue
        what = f"/metrics of the router at {target}; figures of each worker have its name as `engine`"
        yield Piece(f"metrics-{number}.txt", what, "".join(f"{line}\n" for line in known_metrics(text)))


def known_metrics(text: str) -> Iterator[str]:
    """Lines of metrics whose names we know."""
    for line in text.splitlines():
        name = line.split(" ")[2] if line.startswith(("# HELP ", "# TYPE ")) and line.count(" ") >= 2 else line
        if name.startswith(_METRICS):
            yield line


def environments(sources: Sources) -> Iterator[Mapping[str, str]]:
    """Of this command and of every process: whose secrets must not get out."""
    yield sources.environment
    for each in sources.processes:
        yield each.environment or {}
