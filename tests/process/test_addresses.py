"""Why an address cannot be listened on, in one sentence, and the exit codes that say it."""

import errno
import subprocess
import sys
from itertools import combinations

import pytest

from baton.elastic_worker.config import ElasticConfig
from baton.process.config import ConfigError, read_config
from baton.process.registry.redis_server import free_port, free_ports
from baton.process.serving.addresses import Address, ListenError, check_free, refusal
from baton.process.serving.exit_codes import ExitCode
from baton.router.config import RouterConfig

ROUTER = ("--workers", "prefill@10.0.0.1:1,decode@10.0.0.1:2")
WORKER = ("--role", "decode", "--worker-id", "w", "--model", "m")
REASONS = [
    ("/run/baton.sock", "unix sockets are not supported"),
    ("unix:/run/baton.sock", "unix sockets are not supported"),
    ("[::1]", "without brackets"),
    ("no-such-host.invalid", "no host of that name"),
    ("203.0.113.9", "no network interface of this machine has that address"),
]


@pytest.mark.parametrize(("host", "reason"), REASONS)
def test_address_that_cannot_be_bound_is_refused_with_its_reason(host: str, reason: str) -> None:
    with pytest.raises(ListenError, match=reason) as refused:
        check_free(Address("--port", host, free_port()))
    assert "--port" in str(refused.value) and host in str(refused.value)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EACCES, "above 1023"), (errno.EAFNOSUPPORT, "IPv6 is turned off"), (errno.ENOBUFS, "No buffer space")],
)
def test_refusal_of_the_kernel_has_a_remedy(number: int, reason: str) -> None:
    assert reason in str(refusal(Address("--port", "::1", 80), OSError(number, "No buffer space available")))


def test_port_zero_and_free_ports_are_accepted() -> None:
    check_free(Address("--port", "localhost", 0))
    check_free(Address("--port", "0.0.0.0", free_port()))


@pytest.mark.parametrize(
    ("config", "arguments", "options"),
    [
        (RouterConfig, ROUTER, ("--port", "--admin-port", "--http-port", "--metrics-port")),
        (ElasticConfig, WORKER, ("--port", "--transfer-port", "--health-port")),
    ],
)
def test_configuration_with_one_port_twice_names_both_options(
    config: type[RouterConfig | ElasticConfig], arguments: tuple[str, ...], options: tuple[str, ...]
) -> None:
    for first, second in combinations(options, 2):
        with pytest.raises(ConfigError, match=rf"{first} .* and {second} .* are the same port"):
            read_config(config, [*arguments, first, "7000", second, "7000"])


def test_configuration_with_the_port_of_a_local_server_is_refused() -> None:
    for variable, url in (("--redis-url", "redis://localhost"), ("--otlp-endpoint", "127.0.0.1:6379")):
        with pytest.raises(ConfigError, match=variable):
            read_config(RouterConfig, [*ROUTER, "--port", "6379", variable, url])
    with pytest.raises(ConfigError, match="--workers"):
        read_config(RouterConfig, ["--workers", "prefill@127.0.0.1:7000,decode@127.0.0.1:7001", "--port", "7001"])


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ("--http-port", "{taken}"),
            ExitCode.CANNOT_LISTEN,
            "--http-port 127.0.0.1:{taken}: the port is in use by pid",
        ),
        (
            ("--port", "{taken}", "--share-ports"),
            ExitCode.CANNOT_LISTEN,
            "--port 127.0.0.1:{taken}: the port is in use by pid",
        ),
        (
            ("--http-port", "{taken}", "--share-ports"),
            ExitCode.CANNOT_LISTEN,
            "--http-port 127.0.0.1:{taken}: the port is in use by pid",
        ),
        (
            ("--http-port", "0", "--share-ports"),
            ExitCode.WRONG_CONFIGURATION,
            "--share-ports needs a --port and an --http-port",
        ),
        (("--cores", "4095"), ExitCode.WRONG_CONFIGURATION, "--cores: [4095] are not available"),
        (("--tls-cert", "/etc/passwd", "--tls-key", "/etc/passwd"), ExitCode.WRONG_CONFIGURATION, "/etc/passwd"),
    ],
)
def test_router_with_a_wrong_configuration_ends_with_one_sentence(
    arguments: tuple[str, ...], code: ExitCode, sentence: str, listening: int
) -> None:
    ports = dict(zip(("--port", "--admin-port", "--http-port"), map(str, free_ports(3)), strict=True))
    flags = [part for pair in ports.items() for part in pair]
    command = [sys.executable, "-P", "-m", "baton.router", *ROUTER, *flags]
    ended = subprocess.run(
        [*command, *(part.format(taken=listening) for part in arguments)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr
    assert sentence.format(taken=listening) in ended.stderr.strip().splitlines()[-1]
