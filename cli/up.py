"""Run a service on this machine until a signal stops it (`baton up`).

Options of `up` that are fields of router or worker are passed to them as flags. Each option reads its BATON_* variable
too (`options.VARIABLES_PREFIX`); all other variables reach the processes (`process_plan.plan_processes`).
"""

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from baton import child_environment
from baton.cli.bundle.redaction import shown_flags, shown_variables
from baton.cli.connection import API_KEY_VARIABLE, TLS_CA_VARIABLE
from baton.cli.options import DEFAULT_TARGET, TARGET_VARIABLE, admin_target_of, format_bytes
from baton.cli.span_files.places import begin_trace_file, chosen_collector
from baton.cli.up_options import UpOptions
from baton.client import AsyncAdminClient, BatonClientError, RetryPolicy
from baton.elastic_worker.config import ElasticConfig
from baton.launch import CommandFailed
from baton.launch.devices import Machine, inspect_machine, plan_cores
from baton.launch.log_files import LogFile, TeeWriter, begin_logs
from baton.launch.model_source import ModelSource, find_adapters, find_model, has_chat_template
from baton.launch.paths import ROOT, RUNTIME
from baton.launch.ports import LOOPBACK, RouterPorts, check_ports, claimed, is_free, plan_ports, reserved
from baton.launch.process_plan import (
    RedisSource,
    ServiceLayout,
    choose_redis,
    plan_processes,
    public_addresses,
    router_addresses,
)
from baton.launch.processes import ChildProcess, LineWriter, ProcessSpec, Stage, form_for
from baton.launch.readiness import NotReady, wait_until_serving, waiting_for
from baton.launch.run_record import RunRecord, kept_secret, remove_admin_tokens, write_admin_tokens, write_run_record
from baton.launch.supervisor import ServiceFailed, Supervisor
from baton.process.config import ProcessConfig, RegistryConfig, Settings, TelemetryConfig, check_variables, read_config
from baton.process.security.cluster_secret import ClusterSecret, new_secret
from baton.process.serving.signals import answer_quit, handle_hangup
from baton.router.config import RouterConfig, too_open
from baton.text.host.memory import shortage
from baton.text.pooler_files import ModelKind, kind_of


def ready_lines(layout: ServiceLayout, command: str, default_target: str, chats: bool) -> list[str]:
    """Return the addresses and two commands to try.

    `default_target`: the target of other commands without --target. `chats`: the model has a chat template.
    """
    host, admin = layout.target.rpartition(":")[0], layout.admin_targets[0]
    page = f"{'http' if layout.router['tls_cert'] is None else 'https'}://{host}:{layout.ports[0].http}/"
    lines = [
        f"  page      {page}",
        f"  HTTP      {page}v1   (OpenAI's API)",
        f"  gRPC      {layout.target}   (baton.v1.BatonService)",
        f"  admin     {admin}",
    ]
    if len(layout.ports) > 1:
        lines[-1] = f"  admin     {', '.join(layout.admin_targets)}   ({len(layout.ports)} routers)"
        lines.append(f"  metrics   {', '.join(f'{host}:{each.metrics}' for each in layout.ports)}")
    elsewhere = "" if layout.target == default_target else f" --target {layout.target}"
    question = "chat 'What is a block table?'" if chats else "generate 'Once upon a time' --max-tokens 32"
    found = elsewhere if admin == admin_target_of(layout.target).split(",")[0] else f" --admin {admin}"
    return [
        *lines,
        f"  try       {_variables(layout)}{command} {question}{elsewhere}",
        f"            {command} status{found}",
    ]


def script_command(root: Path, current: Path, programs: Path) -> str:
    """Return the command that calls `baton` from the folder `current`.

    It is the script of a clone at `root`, or the program that a wheel installed in `programs`.
    """
    if (root / "pyproject.toml").is_file():
        return "./baton" if root == current else shlex.quote(str(root / "baton"))
    installed = programs / "baton"
    found = shutil.which("baton")
    return "baton" if found is not None and Path(found) == installed else shlex.quote(str(installed))


def _variables(layout: ServiceLayout) -> str:
    """Return the variables to set for a client's command: its API key, and the server's certificate as trusted CA."""
    given = [f"{API_KEY_VARIABLE}=..."] if layout.router["api_keys"] is not None else []
    if layout.router["tls_cert"] is not None:
        given.append(f"{TLS_CA_VARIABLE}={shlex.quote(str(layout.router['tls_cert'].absolute()))}")
    return "".join(f"{variable} " for variable in given)


STATUS_TIMEOUT_S = 1.0
OWN_LOG = "up"  # name of the log file of `up` itself
OWN_OPTIONS = frozenset(each.name for each in fields(UpOptions))
"""Names of the options of `up`, which also reads the BATON_* variable of each."""
_DECIDED = {"model", "model_name", "device", "adapter", "host", "port", "http_port", "admin_port", "strict_env"}
"""Options that `up` resolves before it passes them on, or uses itself."""


def run_up(options: UpOptions) -> int:
    """Run a service until SIGINT, SIGTERM, or SIGHUP at a terminal; return the exit code.

    Raises: CommandFailed, ConfigError, before any process starts.
    """
    has_keys = options.api_keys is not None or bool(os.environ.get("BATON_API_KEY_HASHES"))
    risk = too_open((options.host,), LOOPBACK, has_keys)
    if risk and not options.insecure:
        raise CommandFailed(f"{risk}; use --api-keys FILE, or --insecure to allow it")
    surroundings = read_config(InheritedSettings, ())
    for warning in check_variables(surroundings, options.strict_env):
        print(f"baton: {warning}", file=sys.stderr)
    machine = inspect_machine(options.device)
    ports = _router_ports(options, machine)
    addresses = router_addresses(options.host, ports)
    check_ports(addresses, surroundings.connects_to)
    source = find_model(options.model, ROOT, RUNTIME).called(options.model_name)
    collector = chosen_collector(options.trace_file)
    prefill, decode = _worker_counts(options, machine, source.folder)
    cores = plan_cores(machine.cores, prefill, decode, len(ports))
    redis = choose_redis(surroundings.redis_url, cores.router, {address.port for address in addresses})
    port = ports[0].public
    shared = {
        "model": source.folder,
        "namespace": options.namespace or f"baton-{port}",
        "trace_file": options.trace_file or begin_trace_file(RUNTIME, port, collector),
    }
    layout = ServiceLayout(
        machine=machine,
        prefill=prefill,
        decode=decode,
        host=options.host,
        ports=ports,
        core_use=RUNTIME / f"cores-{port}",
        redis_url=redis.url,
        secret=surroundings.secret_text or (new_secret() if redis.spec else kept_secret(RUNTIME, port)),
        run_id=secrets.token_hex(8),
        drain_s=surroundings.drain_s,
        router=passed_on(options, RouterConfig) | shared,
        worker=passed_on(options, ElasticConfig)
        | shared
        | {
            "model_name": source.name,
            "adapter": find_adapters(options.adapter or (), source.name),
            "draft_model": options.draft_model
            and find_model(options.draft_model, ROOT, RUNTIME, "--draft-model").folder,
            "kv_memory": options.kv_memory or machine.default_kv_bytes,
            "kv_tier_dir": None if options.kv_tier_dir is None else options.kv_tier_dir.absolute(),
        },
    )
    specs = plan_processes(layout, os.environ, OWN_OPTIONS)
    if any(getattr(options, name) != getattr(UpOptions(), name) for name in SIZE_OPTIONS):
        check_sizes(layout)
    public = public_addresses(options.host, ports) if len(ports) > 1 else []
    with claimed(address.port for address in addresses), reserved(public):
        logs = _record_run(layout, specs, RUNTIME)
        return asyncio.run(_Up(layout, source, redis, specs, options.startup_timeout, logs).run())


def passed_on(options: UpOptions, config: type[Settings]) -> dict[str, Any]:
    """Return the options of `up` that are fields of `config` and that `up` passes on unchanged."""
    return {name: getattr(options, name) for name in config.fields if name in OWN_OPTIONS - _DECIDED}


SIZE_OPTIONS = {"kv_memory", "max_model_len", "block_size", "kv_cache_dtype", "tensor_parallel"}
SIZE_OPTIONS |= {"swap_memory", "kv_tier_memory", "prefill", "decode", "draft_model"}
"""Options that may ask for more than model or machine have; their defaults do not."""
CHECK_TIMEOUT_S = 300.0


def check_sizes(layout: ServiceLayout) -> None:
    """Check that the machine has the memory for the model and the options. Raises: CommandFailed with a remedy."""
    workers, machine = layout.prefill + layout.decode, layout.machine
    pools, kv_bytes = f"--kv-memory for {workers} workers", layout.worker["kv_memory"] or 0
    host = {
        "--swap-memory": layout.decode * (layout.worker["swap_memory"] or 0),
        "--kv-tier-memory": workers * (layout.worker["kv_tier_memory"] or 0),
    }
    if machine.gpu_free_bytes:
        _require({"--kv-memory": kv_bytes}, layout.tensor_parallel * max(machine.gpu_free_bytes))
        _require(host, machine.memory_bytes)
        _sizes_of_a_worker(layout)
    else:
        host[pools] = workers * kv_bytes
        _require(host, machine.memory_bytes)
        host[f"weights of {workers} workers"] = workers * _sizes_of_a_worker(layout)["weights"]
        _require(host, machine.memory_bytes)


def _require(amounts: Mapping[str, int], total: int) -> None:
    """Check that the sum of `amounts` does not exceed `total`. Raises: CommandFailed."""
    if why := shortage(amounts, total):
        raise CommandFailed(why)


def _sizes_of_a_worker(layout: ServiceLayout) -> dict[str, int]:
    """Compute the memory of one worker in a process of its own, because that imports torch.

    Raises: CommandFailed if the model does not fit its options.
    """
    worker = layout.worker
    asked = {name: worker[name] for name in ("dtype", "max_model_len", "kv_cache_dtype", "quantize", "tensor_parallel")}
    asked |= {
        "folder": str(worker["model"]),
        "device": layout.device(0),
        "block_tokens": worker["block_size"],
        "kv_memory_bytes": worker["kv_memory"],
        "draft": None if worker["draft_model"] is None else str(worker["draft_model"]),
    }
    command = [sys.executable, "-P", "-m", "baton.engine.check", json.dumps(asked)]
    try:
        checked = subprocess.run(
            command, capture_output=True, text=True, env=child_environment(), timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{worker['model']}: checking its memory timed out after {CHECK_TIMEOUT_S:g} s") from error
    if checked.returncode:
        raise CommandFailed(
            checked.stderr.strip().rpartition("\n")[2] or f"{worker['model']}: its memory cannot be checked"
        )
    sizes: dict[str, int] = json.loads(checked.stdout)
    return sizes


class InheritedSettings(ProcessConfig, RegistryConfig, TelemetryConfig):
    """Settings without an option of `up`, read from the variables that the processes of `up` read too."""


def _worker_counts(options: UpOptions, machine: Machine, folder: Path) -> tuple[int, int]:
    """Return the numbers of prefill and decode workers; a model that generates no text has no decode workers.

    Raises: CommandFailed.
    """
    kind, degree = kind_of(folder), options.tensor_parallel
    if kind is ModelKind.LANGUAGE_MODEL:
        return machine.worker_counts(options.prefill_workers, options.decode, degree)
    prefill, _ = machine.worker_counts(options.prefill_workers, 0, degree)
    if not prefill:
        raise CommandFailed(
            f"{folder.name} is {kind}: only prefill workers serve it; start it with --prefill 1 or more"
        )
    return prefill, 0


def _record_run(layout: ServiceLayout, specs: Sequence[ProcessSpec], runtime: Path) -> Path | None:
    """Write the run's record for other commands and return its folder for logs.

    Returns None, with a warning, if nothing can be written.
    """
    flags = {spec.name: shown_flags(spec.command) for spec in specs}
    host = layout.target.rpartition(":")[0]
    port = layout.ports[0].public
    try:
        logs = begin_logs(runtime, port)
        record = RunRecord(
            pid=os.getpid(),
            admin_targets=layout.admin_targets,
            http_targets=(f"{host}:{layout.ports[0].http}",),
            log_folder=str(logs),
            trace_file=str(layout.router["trace_file"]),
            targets=(layout.target,),
            flags=flags,
            variables=shown_variables(os.environ),
        )
        write_run_record(runtime, port, record)
    except OSError as error:
        print(f"cannot write logs in {runtime}: {error.strerror}; continuing without", file=sys.stderr)
        return None
    return logs


def _router_ports(options: UpOptions, machine: Machine) -> tuple[RouterPorts, ...]:
    workers = machine.worker_counts(options.prefill_workers, options.decode, options.tensor_parallel)
    return plan_ports(
        options.routers or machine.router_count(sum(workers)),
        options.port,
        options.admin_port,
        options.http_port,
        lambda number: is_free(options.host, number),
    )


class _Up:
    """Run of a service: start it, print its addresses once a readiness probe has passed, wait for a signal, stop it."""

    def __init__(
        self,
        layout: ServiceLayout,
        source: ModelSource,
        redis: RedisSource,
        specs: Sequence[ProcessSpec],
        startup_timeout_s: float,
        log_folder: Path | None,
    ) -> None:
        """Prepare a run. `log_folder`: None if no files can be written."""
        self._layout = layout
        self._specs = [*([redis.spec] if redis.spec else []), *specs]
        self._secret = ClusterSecret(layout.secret)
        self._source = source
        self._redis = redis
        self._startup_timeout_s = startup_timeout_s
        self._output = LineWriter(sys.stdout, form_for(sys.stdout))
        self._errors = LineWriter(sys.stderr, form_for(sys.stderr))
        self._logs = log_folder
        self._own_log = self._log_of(OWN_LOG)
        self._ended = asyncio.Event()
        self._workers = [spec.name for spec in specs if spec.stage is Stage.WORKER]

    async def run(self) -> int:
        supervisor = Supervisor(self._specs, self._start_child, self._say)
        self._handle_signals(supervisor)
        self._announce()
        admin_ports = [each.admin for each in self._layout.ports]
        self._open_to_user(lambda: write_admin_tokens(self._secret, admin_ports))
        supervisor.start()
        failure: Exception | None = None
        try:
            await self._until_ended(supervisor)
            exit_code = 0
        except (ServiceFailed, NotReady) as error:
            failure = error
            self._say(str(error))
            exit_code = 1
        self._say("draining: router, workers, Redis")
        await supervisor.stop()
        self._open_to_user(lambda: remove_admin_tokens(admin_ports))
        shutil.rmtree(self._layout.core_use, ignore_errors=True)
        self._say("stopped" if failure is None else f"stopped: {failure}")
        for line in failure.tail if isinstance(failure, ServiceFailed) else ():
            self._say(f"  {line}")
        return 1 if supervisor.was_forced else exit_code

    def _open_to_user(self, change: Callable[[], None]) -> None:
        """Add or remove this user's admin tokens. Without a writable home, only report that `status` needs a key."""
        try:
            change()
        except (OSError, RuntimeError) as error:
            self._say(f"cannot write an admin token to ~/.cache/baton: {error}; `status` needs an admin API key")

    async def _until_ended(self, supervisor: Supervisor) -> None:
        """Announce that the service is ready, and wait for a signal. Raises: ServiceFailed, NotReady."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        ended = asyncio.create_task(self._ended.wait())
        serving = asyncio.create_task(self._until_serving())
        try:
            waited: set[asyncio.Future[Any]] = {ended, serving, supervisor.failure}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.failure.done():
                supervisor.failure.result()
            if serving.done():
                serving.result()
                supervisor.mark_ready()
                self._announce_ready(loop.time() - started)
                await asyncio.wait(waited - {serving}, return_when=asyncio.FIRST_COMPLETED)
                if supervisor.failure.done():
                    supervisor.failure.result()
        finally:
            for task in (ended, serving):
                task.cancel()

    async def _until_serving(self) -> None:
        """Wait until every router serves. Raises: NotReady."""
        for ports in self._layout.ports:
            # The admin port reports the same health as the public one, without TLS.
            await wait_until_serving(
                f"{LOOPBACK}:{ports.admin}",
                self._startup_timeout_s,
                self._say,
                partial(self._explain, ports.admin),
                run_id=self._layout.run_id,
            )

    def _handle_signals(self, supervisor: Supervisor) -> None:
        def on_signal() -> None:
            if self._ended.is_set():
                self._say("second signal: killing all processes")
                supervisor.force()
            self._ended.set()

        loop = asyncio.get_running_loop()
        answer_quit()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        handle_hangup(on_signal, lambda: supervisor.send_to(Stage.ROUTER, signal.SIGHUP))

    async def _start_child(self, spec: ProcessSpec) -> ChildProcess:
        log = self._log_of(spec.name)
        return await ChildProcess.start(spec, TeeWriter(self._output, log), TeeWriter(self._errors, log))

    def _log_of(self, name: str) -> TeeWriter:
        """Return a writer to a process's log file; it discards the text if no files can be written."""
        return TeeWriter(*([] if self._logs is None else [LogFile(self._logs / f"{name}.log", self._say)]))

    async def _explain(self, admin_port: int) -> str:
        """Return a text that says what the startup of a router still waits for."""
        once = RetryPolicy(attempts=1)
        api_key = self._secret.admin_token(admin_port)
        async with AsyncAdminClient(f"{LOOPBACK}:{admin_port}", retry=once, api_key=api_key) as admin:
            try:
                return waiting_for(self._workers, await admin.status(timeout_s=STATUS_TIMEOUT_S))
            except BatonClientError:
                return "the router does not answer yet"

    def _announce(self) -> None:
        layout = self._layout
        if self._source.is_random:
            self._say("models/tableqa is missing: serving a tiny checkpoint with random weights, whose output is noise")
        self._say(f"model {self._source.name} from {self._source.folder}")
        ranks, kv_bytes = layout.tensor_parallel, layout.worker["kv_memory"]
        devices = sorted({layout.device(worker) for worker in range(layout.prefill + layout.decode)})
        amount = "the remaining memory" if kv_bytes is None else format_bytes(kv_bytes)
        self._say(
            f"{_workers(layout)} on {', '.join(devices)}{f', {ranks} ranks each' if ranks > 1 else ''}, "
            f"KV: {amount} each; Redis: {self._redis.description}"
        )
        path = "prefill, transfer and decode" if layout.prefill else "a worker"
        self._say(f"starting: load, warm up, then a readiness probe through {path}")

    def _announce_ready(self, seconds: float) -> None:
        self._say(f"ready in {seconds:.1f} s")
        default_target = os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET
        chats = has_chat_template(self._source.folder)
        command = script_command(ROOT, Path.cwd(), Path(sys.executable).parent)
        for line in ready_lines(self._layout, command, default_target, chats):
            self._say(line)

    def _say(self, text: str) -> None:
        line = f"{'baton':<9} | {text}"
        self._output.write(line)
        self._own_log.write(line)


def _workers(layout: ServiceLayout) -> str:
    if not layout.decode:
        return f"{layout.prefill} prefill"
    if layout.prefill:
        return f"{layout.prefill} prefill + {layout.decode} decode"
    return f"{layout.decode} decode, prefill colocated,"
