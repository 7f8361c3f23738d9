"""A stack on separate hosts answers like one process, also when a link or host fails. See hosts.py."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from baton import LLM, SamplingParams
from baton.client import AsyncBatonClient, ClusterStatus, Delta, Link, RetryPolicy
from baton.lab.harness.hosts.reach import socket_in
from baton.lab.tableqa.train_data import Person, table
from tests.e2e.conftest import REPOSITORY
from tests.e2e.held import answers_held
from tests.e2e.hosts import (
    DECODE,
    HTTP_PORT,
    OTHER_DECODE,
    PORT,
    REDIS_TLS_PORT,
    ROUTER,
    WORKER_PORT,
    WORKERS,
    HostedStack,
    hosted_stack,
)
from tests.fixtures.hosts import needs_root
from tests.fixtures.sockets import network_listening

pytestmark = needs_root
MODEL = REPOSITORY / "models" / "tableqa"
PEOPLE = [
    Person(number, name, age, job, land)
    for number, (name, age, job, land) in enumerate(
        [
            ("Paula Archer", 20, "Writer", "Denmark"),
            ("Grace Field", 46, "Sailor", "Poland"),
            ("Walter Harper", 25, "Engineer", "Kenya"),
            ("Farid Carter", 53, "Scientist", "India"),
            ("Yara Rain", 75, "Photographer", "Italy"),
            ("Leo Red", 72, "Farmer", "Denmark"),
        ],
        start=1,
    )
]
QUESTIONS = [
    [{"role": "system", "content": table(PEOPLE)}, {"role": "user", "content": f"How old is {person.name}?"}]
    for person in PEOPLE
]
LONG = [3 + 7 * place % 400 for place in range(200)]
LONG_TOKENS = 1_000
FIRST_TOKENS = 50  # before the fault
HELD_TOKENS = 900  # after which an answer pauses until the fault
CUT_S = 2.0  # longer than a router waits before it takes a worker for lost
BOUND_S = 60.0
SHOWN_S = 30.0  # for a server to answer a client that does not speak TLS
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
ALERT = b"\x15"
ASKED = {PORT: PREFACE, HTTP_PORT: b"GET /health HTTP/1.1\r\n\r\n", REDIS_TLS_PORT: b"PING\r\n", WORKER_PORT: PREFACE}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedStack]:
    with hosted_stack(tmp_path_factory.mktemp("hosts"), MODEL) as stack:
        yield stack


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """Engine in this process with the same model."""
    llm = LLM(str(MODEL), dtype="float32", kv_cache_memory_bytes=64 << 20)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def undisturbed(alone: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=LONG_TOKENS, ignore_eos=True)
    [output] = alone.generate({"prompt_token_ids": LONG}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture
async def client(cluster: HostedStack) -> AsyncIterator[AsyncBatonClient]:
    retry = RetryPolicy(attempts=1)
    async with AsyncBatonClient(cluster.target, timeout_s=BOUND_S, retry=retry, tls=cluster.authority) as client:
        yield client


async def test_answers_equal_those_of_one_process(cluster: HostedStack, client: AsyncBatonClient, alone: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=64)
    expected = [list(each.outputs[0].token_ids) for each in alone.chat(QUESTIONS, params, use_tqdm=False)]
    answers = await asyncio.gather(*(client.complete_chat(each, max_tokens=64, temperature=0.0) for each in QUESTIONS))
    assert [list(answer.choices[0].token_ids) for answer in answers] == expected
    cluster.wait_idle()


def test_hosts_with_equal_names_are_distinguished_by_address(cluster: HostedStack) -> None:
    """All hosts have the same boot id, host name and PIDs; still no worker may take another host for its own."""
    cluster.wait_for(lambda: bool(links_of(cluster)), BOUND_S, "report of a link")
    workers = {worker.worker_id: worker for worker in cluster.status().workers}
    assert len({worker.pid for worker in workers.values()}) == 1
    endpoints = {name: workers[name].endpoint for name in WORKERS}
    expected = {name: f"[{cluster.hosts.address6(name)}]:{WORKER_PORT}" for name in WORKERS}
    assert endpoints == {**expected, OTHER_DECODE: f"{cluster.hosts.name6(OTHER_DECODE)}:{WORKER_PORT}"}
    assert "shared_memory" not in {link.transport for link in links_of(cluster)}


def links_of(cluster: HostedStack) -> list[Link]:
    """Return the transports by which workers pull KV, as they report them."""
    return [link for worker in cluster.status().workers if worker.load is not None for link in worker.load.links]


def test_only_tls_is_spoken_beyond_loopback(cluster: HostedStack) -> None:
    open_ones = {
        (name, port)
        for name in cluster.hosts.names
        for host, port in network_listening(cluster.hosts.first_process(name))
        if host not in ("127.0.0.1", "::1")
    }
    servers = {(ROUTER, PORT), (ROUTER, HTTP_PORT), (ROUTER, REDIS_TLS_PORT)}
    assert open_ones >= servers | {(name, WORKER_PORT) for name in WORKERS}
    for name, port in sorted(open_ones):
        heard = answer_of(cluster, name, port, None)
        assert heard == b"" or heard.startswith(ALERT), (name, port)


@pytest.mark.parametrize("port", [WORKER_PORT, REDIS_TLS_PORT])
def test_client_without_certificate_is_refused_between_hosts(cluster: HostedStack, port: int) -> None:
    name = ROUTER if port == REDIS_TLS_PORT else DECODE
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    assert answer_of(cluster, name, port, context) == b""
    context.load_cert_chain(cluster.internal_tls.certificate, cluster.internal_tls.key)
    assert answer_of(cluster, name, port, context)


def answer_of(cluster: HostedStack, name: str, port: int, context: ssl.SSLContext | None) -> bytes:
    """Return the first bytes of an answer, with TLS if a context is given; empty if the connection was refused."""
    connection = socket_in(cluster.hosts.switch_process, socket.AF_INET6)
    with connection:
        connection.settimeout(SHOWN_S)
        connection.connect((cluster.hosts.address6(name), port))
        try:
            if context is not None:
                connection = context.wrap_socket(connection)
            with connection:
                connection.sendall(ASKED.get(port, PREFACE))
                return connection.recv(64)
        except (ConnectionError, ssl.SSLError):
            return b""


async def stream_over(cluster: HostedStack, client: AsyncBatonClient, breaks: Callable[[str], None]) -> list[int]:
    """Return the tokens of a long answer; `breaks` is called in its middle with the name of its decode worker."""
    tokens: list[int] = []
    is_whole = True
    with answers_held(cluster, HELD_TOKENS) as held:
        async for event in client.generate(LONG, max_tokens=LONG_TOKENS, temperature=0.0, ignore_eos=True):
            tokens += event.token_ids if isinstance(event, Delta) else ()
            if is_whole and len(tokens) >= FIRST_TOKENS:
                is_whole = False
                breaks(answering(await asyncio.to_thread(cluster.status)))
                held.let_go()
    return tokens


def answering(status: ClusterStatus) -> str:
    """Return the decode worker that has a request of this router."""
    [name] = [each.worker_id for each in status.workers if each.role == "decode" and each.in_flight_requests]
    return name


async def test_briefly_cut_link_costs_no_token(
    cluster: HostedStack, client: AsyncBatonClient, undisturbed: list[int]
) -> None:
    cut: list[str] = []

    def breaks(name: str) -> None:
        cluster.hosts.cut(name)
        cut.append(name)
        asyncio.get_running_loop().call_later(CUT_S, cluster.hosts.mend, name)

    assert await stream_over(cluster, client, breaks) == undisturbed
    assert cut
    await asyncio.to_thread(cluster.wait_ready)
    await asyncio.to_thread(cluster.wait_idle)


async def test_lost_host_costs_a_pause_and_no_token(
    cluster: HostedStack, client: AsyncBatonClient, undisturbed: list[int]
) -> None:
    lost: list[str] = []

    def breaks(name: str) -> None:
        cluster.lose(name)
        lost.append(name)

    assert await stream_over(cluster, client, breaks) == undisturbed
    [name] = lost
    cluster.bring_back(name)
    await asyncio.to_thread(cluster.wait_ready)
    await asyncio.to_thread(cluster.wait_idle)
