"""`baton up`: from options and variables to a running service on this machine, until a signal ends it.

A process reads BATON_X where it is given no flag --x, and `up` gives its processes flags. So each option of `up` reads
the variable of its name too (`options.VARIABLES_PREFIX`), and variables that `up` decides by itself may not be set.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from baton.cli.bundle.redaction import shown_flags, shown_variables
from baton.cli.commands.up import UpOptions
from baton.cli.connection import API_KEY_VARIABLE, TLS_CA_VARIABLE
from baton.cli.options import DEFAULT_TARGET, TARGET_VARIABLE, VARIABLES_PREFIX, admin_target_of, format_bytes
from baton.cli.span_files.places import begin_trace_file, chosen_collector
from baton.client import AsyncAdminClient, BatonClientError, RetryPolicy
from baton.launch import CommandFailed
from baton.launch.devices import Machine, inspect_machine, plan_cores
from baton.launch.log_files import LogFile, TeeWriter, begin_logs
from baton.launch.model_source import ModelNotUsable, ModelSource, find_adapters, find_model, has_chat_template
from baton.launch.paths import ROOT, RUNTIME
from baton.launch.ports import LOOPBACK, check_ports, choose_http_ports, claimed, is_free
from baton.launch.process_plan import (
    OUR_CODE,
    RedisSource,
    UpSettings,
    choose_redis,
    plan_processes,
    router_addresses,
    router_ports,
)
from baton.launch.processes import ChildProcess, LineWriter, ProcessSpec, Stage, form_for
from baton.launch.readiness import NotReady, wait_until_serving, waiting_for
from baton.launch.run_record import RunRecord, kept_secret, remove_admin_tokens, write_admin_tokens, write_run_record
from baton.launch.supervisor import ServiceFailed, Supervisor
from baton.process.config import (
    ConfigError,
    ProcessConfig,
    RegistryConfig,
    TelemetryConfig,
    check_variables,
    read_config,
)
from baton.process.registry.redis_server import free_port, free_ports
from baton.process.security.cluster_secret import ClusterSecret, new_secret
from baton.process.serving.signals import answer_quit, handle_hangup
from baton.router.config import too_open
from baton.text.host.memory import shortage
from baton.text.pooler_files import ModelKind, kind_of


def ready_lines(settings: UpSettings, command: str, default_target: str, chats: bool) -> list[str]:
    """`default_target`: the target of the other commands without --target. `chats`: the model has a chat template."""
    target, admin = router_target(settings), f"{LOOPBACK}:{settings.admin_port}"
    host = target.rpartition(":")[0]
    page = f"{'http' if settings.exposure.tls_cert is None else 'https'}://{host}:{settings.http_ports[0]}/"
    lines = [
        f"  page      {page}",
        f"  HTTP      {page}v1   (OpenAI's API)",
        f"  gRPC      {target}   (baton.v1.BatonService)",
        f"  admin     {admin}",
    ]
    for number, (public_port, admin_port) in enumerate(router_ports(settings)[1:], 2):
        http_port = settings.http_ports[number - 1]
        lines.append(f"  router {number}  {host}:{public_port}, HTTP {http_port}, admin {LOOPBACK}:{admin_port}")
    elsewhere = "" if target == default_target else f" --target {target}"
    question = "chat 'What is a block table?'" if chats else "generate 'Once upon a time' --max-tokens 32"
    found = elsewhere if admin == admin_target_of(target) else f" --admin {admin}"
    return [
        *lines,
        f"  try       {_variables(settings)}{command} {question}{elsewhere}",
        f"            {command} status{found}",
    ]


def router_target(settings: UpSettings) -> str:
    """host:port of the first router for a client on this machine: one cannot connect to an address for listening
    everywhere.
    """
    host = LOOPBACK if settings.host in ("0.0.0.0", "::") else settings.host
    return f"[{host}]:{settings.port}" if ":" in host else f"{host}:{settings.port}"


def script_command(root: Path, current: Path, programs: Path) -> str:
    """Command that calls `baton` from the folder `current`: the script of a clone at `root`, else the command that a
    wheel has installed in `programs`.
    """
    if (root / "pyproject.toml").is_file():
        return "./baton" if root == current else shlex.quote(str(root / "baton"))
    installed = programs / "baton"
    found = shutil.which("baton")
    return "baton" if found is not None and Path(found) == installed else shlex.quote(str(installed))


def _variables(settings: UpSettings) -> str:
    """A key is only in the hands of its user. The certificate vouches for itself, under any authority."""
    given = [f"{API_KEY_VARIABLE}=..."] if settings.exposure.api_keys is not None else []
    if settings.exposure.tls_cert is not None:
        given.append(f"{TLS_CA_VARIABLE}={shlex.quote(str(settings.exposure.tls_cert.absolute()))}")
    return "".join(f"{variable} " for variable in given)


def refuse_overridden(
    specs: Sequence[ProcessSpec], environment: Mapping[str, str], own_options: Collection[str]
) -> None:
    """`own_options`: those of `up`, by name, which have read their variables themselves.

    Raises: CommandFailed.
    """
    read = {variable_of(name) for name in own_options}
    for spec in specs:
        for flag, value in given_flags(spec):
            variable = variable_of(flag)
            wanted = environment.get(variable)
            if wanted and variable not in read and wanted != value:
                given = flag if value is None else f"{flag} {value}"
                raise CommandFailed(
                    f"{variable} is {wanted!r}, but `up` itself starts {spec.name} with {given}; unset the variable, "
                    "or start the processes yourself (docs/deployment.md)"
                )


def variable_of(flag: str) -> str:
    """Of a flag, or of an option's name."""
    return f"{VARIABLES_PREFIX}_{flag.removeprefix('--').replace('-', '_').upper()}"


def given_flags(spec: ProcessSpec) -> Iterator[tuple[str, str | None]]:
    """Each flag of one of our processes, and its value if it has one."""
    arguments = spec.command[spec.command.index("-m") + 2 :]
    for place, flag in enumerate(arguments):
        if flag.startswith("--"):
            following = arguments[place + 1] if place + 1 < len(arguments) else "--"
            yield flag, None if following.startswith("--") else following


STATUS_TIMEOUT_S = 1.0
OWN_LOG = "up"  # name of the file with the lines of `up` itself
OWN_OPTIONS = frozenset(each.name for each in fields(UpOptions))
"""Of `up`, each of which has read the variable of its name too."""


_PASSED_ON = {each.name for each in fields(UpSettings)} & {each.name for each in fields(UpOptions)}
"""Options that are settings of the same name; the others are found out first."""


def run_up(options: UpOptions) -> int:
    """Runs until SIGINT, SIGTERM, or SIGHUP at a terminal; the exit code. Raises CommandFailed, before any start."""
    _refuse_too_open(options)
    surroundings = _surroundings(options.strict_env)
    port = options.port or free_port()
    admin_port = free_port({port}) if options.admin_port == 0 else options.admin_port or port + 1
    more_ports = _more_ports(options.port, admin_port, options.routers - 1)
    reserved = {number for pair in ((port, admin_port), *more_ports) for number in pair}
    http_ports = choose_http_ports(
        options.http_port, options.routers, reserved, lambda number: is_free(options.host, number)
    )
    addresses = router_addresses(options.host, ((port, admin_port), *more_ports), http_ports)
    check_ports(addresses, surroundings.connects_to)
    source = find_model(options.model, ROOT, RUNTIME).called(options.model_name)
    machine = inspect_machine(options.device)
    collector = chosen_collector(options.trace_file)
    prefill, decode = _worker_counts(options, machine, source.folder)
    cores = plan_cores(machine.cores, prefill, decode)
    redis = choose_redis(surroundings.redis_url, cores.router, {*reserved, *http_ports})
    kv_memory_bytes = options.kv_memory or machine.default_kv_bytes
    passed_on: dict[str, Any] = {name: getattr(options, name) for name in _PASSED_ON}
    found = {
        "model_name": source.name,
        "prefill": prefill,
        "decode": decode,
        "port": port,
        "kv_tier_dir": None if options.kv_tier_dir is None else options.kv_tier_dir.absolute(),
        "draft_model": None if options.draft_model is None else _draft_folder(options.draft_model),
        "admin_port": admin_port,
        "namespace": options.namespace or f"baton-{port}",
        "trace_file": options.trace_file or begin_trace_file(RUNTIME, port, collector),
    }
    settings = UpSettings(
        **passed_on | found,
        model_folder=source.folder,
        machine=machine,
        more_ports=more_ports,
        http_ports=http_ports,
        adapters=find_adapters(options.adapter or (), source.name),
        kv_memory_bytes=kv_memory_bytes,
        swap_memory_bytes=options.swap_memory,
        kv_tier_memory_bytes=options.kv_tier_memory,
        kv_tier_size_bytes=options.kv_tier_size,
        redis_url=redis.url,
        secret=surroundings.secret_text or (new_secret() if redis.spec else _kept_secret(port)),
        collector=None if collector is None else str(collector),
        core_use=RUNTIME / f"cores-{port}",
        exposure=options.exposure,
        run_id=secrets.token_hex(8),
        drain_s=surroundings.drain_s,
    )
    specs = plan_processes(settings)
    refuse_overridden(specs, os.environ, OWN_OPTIONS)
    if any(getattr(options, name) != getattr(UpOptions(), name) for name in SIZES):
        check_sizes(settings)
    with claimed(address.port for address in addresses):
        logs = _note_run(settings, specs, RUNTIME)
        return asyncio.run(_Up(settings, source, redis, options.startup_timeout, logs).run())


SIZES = {"kv_memory", "max_model_len", "block_size", "kv_cache_dtype", "tensor_parallel"}
SIZES |= {"swap_memory", "kv_tier_memory", "prefill", "decode", "draft_model"}
"""Options that may ask for more than model or machine have; their defaults do not."""
CHECK_TIMEOUT_S = 300.0


def check_sizes(settings: UpSettings) -> None:
    """Raises: CommandFailed, naming options, amounts and what would fit."""
    workers, machine = settings.prefill + settings.decode, settings.machine
    pools, kv_bytes = f"--kv-memory for {workers} workers", settings.kv_memory_bytes or 0
    host = {
        "--swap-memory": settings.decode * (settings.swap_memory_bytes or 0),
        "--kv-tier-memory": workers * (settings.kv_tier_memory_bytes or 0),
    }
    if machine.gpu_free_bytes:
        _require({"--kv-memory": kv_bytes}, settings.tensor_parallel * max(machine.gpu_free_bytes))
        _require(host, machine.memory_bytes)
        _sizes_of_a_worker(settings)
    else:
        host[pools] = workers * kv_bytes
        _require(host, machine.memory_bytes)
        host[f"weights of {workers} workers"] = workers * _sizes_of_a_worker(settings)["weights"]
        _require(host, machine.memory_bytes)


def _require(amounts: Mapping[str, int], total: int) -> None:
    """Raises: CommandFailed where they exceed it together."""
    if why := shortage(amounts, total):
        raise CommandFailed(why)


def _sizes_of_a_worker(settings: UpSettings) -> dict[str, int]:
    """In a process of its own, which imports torch. Raises: CommandFailed where the model does not fit its options."""
    asked = {
        "folder": str(settings.model_folder),
        "device": settings.machine.device(0, settings.tensor_parallel),
        "dtype": settings.dtype,
        "block_tokens": settings.block_size,
        "kv_memory_bytes": settings.kv_memory_bytes,
        "max_model_len": settings.max_model_len,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "quantize": settings.quantize,
        "tensor_parallel": settings.tensor_parallel,
        "draft": None if settings.draft_model is None else str(settings.draft_model),
    }
    command = [sys.executable, "-P", "-m", "baton.engine.check", json.dumps(asked)]
    environment = {**os.environ, **OUR_CODE}
    try:
        checked = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{settings.model_folder}: not checked within {CHECK_TIMEOUT_S:g} s") from error
    if checked.returncode:
        raise CommandFailed(checked.stderr.strip().rpartition("\n")[2] or f"{settings.model_folder}: cannot be checked")
    sizes: dict[str, int] = json.loads(checked.stdout)
    return sizes


class Surroundings(ProcessConfig, RegistryConfig, TelemetryConfig):
    """Settings without an option of `up`, by the variables that our processes read too."""


def _surroundings(strict_env: bool) -> Surroundings:
    """Raises: CommandFailed."""
    try:
        config = read_config(Surroundings, ())
        for unknown in check_variables(config, strict_env):
            print(f"baton: {unknown}", file=sys.stderr)
        return config
    except ConfigError as error:
        raise CommandFailed(str(error)) from error


def _kept_secret(port: int) -> str:
    """What is kept of responses in a Redis of others outlives this run, and so does the secret that signs it.

    Raises: CommandFailed.
    """
    try:
        return kept_secret(RUNTIME, port)
    except OSError as error:
        raise CommandFailed(f"the secret of the run cannot be kept in {RUNTIME}: {error.strerror}") from error


def _worker_counts(options: UpOptions, machine: Machine, folder: Path) -> tuple[int, int]:
    """Numbers of prefill and decode workers. A model that generates no text has no decode workers.

    Raises: CommandFailed.
    """
    kind, degree = kind_of(folder), options.tensor_parallel
    if kind is ModelKind.LANGUAGE_MODEL:
        return machine.worker_counts(options.prefill_workers, options.decode, degree)
    prefill, _ = machine.worker_counts(options.prefill_workers, 0, degree)
    if not prefill:
        raise CommandFailed(f"{folder.name} is {kind}: prefill workers alone serve it, and --prefill allows none")
    return prefill, 0


def _draft_folder(given: str) -> Path:
    """Raises: CommandFailed."""
    try:
        return find_model(given, ROOT, RUNTIME).folder
    except ModelNotUsable as error:
        raise CommandFailed(f"the draft model: {error}") from error


def _note_run(settings: UpSettings, specs: Sequence[ProcessSpec], runtime: Path) -> Path | None:
    """For `baton bundle`. Returns the folder for logs; None, with a warning, where nothing can be written."""
    own_module = 2  # "-m" and its name
    flags = {spec.name: shown_flags(spec.command[spec.command.index("-m") + own_module :]) for spec in specs}
    host = router_target(settings).rpartition(":")[0]
    try:
        logs = begin_logs(runtime, settings.port)
        record = RunRecord(
            pid=os.getpid(),
            admin_targets=tuple(f"{LOOPBACK}:{admin}" for _, admin in router_ports(settings)),
            http_targets=tuple(f"{host}:{port}" for port in settings.http_ports),
            log_folder=str(logs),
            trace_file=str(settings.trace_file),
            targets=tuple(f"{host}:{port}" for port, _ in router_ports(settings)),
            flags=flags,
            variables=shown_variables(os.environ),
        )
        write_run_record(runtime, settings.port, record)
    except OSError as error:
        print(f"no logs are kept in {runtime}: {error.strerror}", file=sys.stderr)
        return None
    return logs


def _refuse_too_open(options: UpOptions) -> None:
    """Raises CommandFailed."""
    has_keys = options.exposure.api_keys is not None or bool(os.environ.get("BATON_API_KEY_HASHES"))
    risk = too_open((options.host,), LOOPBACK, has_keys)
    if risk and not options.exposure.insecure:
        raise CommandFailed(f"{risk}; use --api-keys FILE, or --insecure to allow it")


def _more_ports(port: int, admin_port: int, count: int) -> tuple[tuple[int, int], ...]:
    """Public and admin ports of routers beside the first: after its own, or free ones where it took a free one."""
    if port == 0:
        ports = free_ports(2 * count, {admin_port})
        return tuple(zip(ports[::2], ports[1::2], strict=True))
    first = max(port, admin_port) + 1
    return tuple((first + 2 * number, first + 2 * number + 1) for number in range(count))


class _Up:
    """One run: start, wait until a readiness probe went all the way, print that, wait for the end, stop."""

    def __init__(
        self,
        settings: UpSettings,
        source: ModelSource,
        redis: RedisSource,
        startup_timeout_s: float,
        log_folder: Path | None,
    ) -> None:
        """`log_folder`: None where no files can be written."""
        self._settings = settings
        self._secret = ClusterSecret(settings.secret)
        self._source = source
        self._redis = redis
        self._startup_timeout_s = startup_timeout_s
        self._output = LineWriter(sys.stdout, form_for(sys.stdout))
        self._errors = LineWriter(sys.stderr, form_for(sys.stderr))
        self._logs = log_folder
        self._own_log = self._log_of(OWN_LOG)
        self._ended = asyncio.Event()
        self._workers: list[str] = []

    async def run(self) -> int:
        specs = [*([self._redis.spec] if self._redis.spec else []), *plan_processes(self._settings)]
        self._workers = [spec.name for spec in specs if spec.stage is Stage.WORKER]
        supervisor = Supervisor(specs, self._start_child, self._say)
        self._handle_signals(supervisor)
        self._announce()
        admin_ports = [admin for _, admin in router_ports(self._settings)]
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
        shutil.rmtree(self._settings.core_use, ignore_errors=True)
        self._say("stopped" if failure is None else f"stopped: {failure}")
        for line in failure.tail if isinstance(failure, ServiceFailed) else ():
            self._say(f"  {line}")
        return 1 if supervisor.was_forced else exit_code

    def _open_to_user(self, change: Callable[[], None]) -> None:
        """A home that cannot be written costs this user's other commands the admin ports, and nothing else."""
        try:
            change()
        except (OSError, RuntimeError) as error:
            self._say(f"`status` and the like need an admin API key, for ~/.cache/baton keeps no token: {error}")

    async def _until_ended(self, supervisor: Supervisor) -> None:
        """Returns when a signal came. Raises: ServiceFailed, NotReady."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        ended = asyncio.create_task(self._ended.wait())
        serving = asyncio.create_task(
            # Over the admin port, which speaks no TLS: the health of one is that of the other.
            wait_until_serving(
                self._admin_target, self._startup_timeout_s, self._say, self._explain, run_id=self._settings.run_id
            )
        )
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
        """A file, or nothing."""
        return TeeWriter(*([] if self._logs is None else [LogFile(self._logs / f"{name}.log", self._say)]))

    async def _explain(self) -> str:
        """The reason why the start still waits."""
        once = RetryPolicy(attempts=1)
        api_key = self._secret.admin_token(self._settings.admin_port)
        async with AsyncAdminClient(self._admin_target, retry=once, api_key=api_key) as admin:
            try:
                return waiting_for(self._workers, await admin.status(timeout_s=STATUS_TIMEOUT_S))
            except BatonClientError:
                return "the router does not answer yet"

    @property
    def _admin_target(self) -> str:
        return f"{LOOPBACK}:{self._settings.admin_port}"

    def _announce(self) -> None:
        settings = self._settings
        if self._source.is_random:
            self._say(
                "models/tableqa is missing: serving a tiny checkpoint of random weights, whose answers mean nothing"
            )
        self._say(f"model {settings.model_name} from {settings.model_folder}")
        workers, ranks = range(settings.prefill + settings.decode), settings.tensor_parallel
        devices = sorted({settings.machine.device(worker, ranks) for worker in workers})
        amount = "the remaining memory" if settings.kv_memory_bytes is None else format_bytes(settings.kv_memory_bytes)
        self._say(
            f"{_workers(settings)} on {', '.join(devices)}{f', {ranks} ranks each' if ranks > 1 else ''}, "
            f"KV: {amount} each; Redis: {self._redis.description}"
        )
        way = "prefill, transfer and decode" if settings.prefill else "a worker"
        self._say(f"starting: load, warm up, then a readiness probe through {way}")

    def _announce_ready(self, seconds: float) -> None:
        self._say(f"ready in {seconds:.1f} s")
        default_target = os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET
        chats = has_chat_template(self._source.folder)
        command = script_command(ROOT, Path.cwd(), Path(sys.executable).parent)
        for line in ready_lines(self._settings, command, default_target, chats):
            self._say(line)

    def _say(self, text: str) -> None:
        line = f"{'baton':<9} | {text}"
        self._output.write(line)
        self._own_log.write(line)


def _workers(settings: UpSettings) -> str:
    if not settings.decode:
        return f"{settings.prefill} prefill"
    if settings.prefill:
        return f"{settings.prefill} prefill + {settings.decode} decode"
    return f"{settings.decode} decode, prefill colocated,"
