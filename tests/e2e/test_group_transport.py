"""KV transfer over a process group between real processes, with gloo; GPUs use the same code with NCCL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import run
from tests.e2e.oracle import LENGTHS, Oracle, ask_transformers, check_answers, make_asked
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.sockets import listening


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_asked(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def stack(asked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from run(
        make_stack(
            tmp_path_factory.mktemp("stack"),
            asked,
            transports={"decode-0": "gloo"},
            worker_flags=["--transfer-interface", "lo"],
            with_redis=False,
            router_flags=["--local-prefill-tokens", "0"],
        )
    )


async def test_answers_equal_transformers_and_nothing_listens_beyond_the_interface(stack: Stack, asked: Path) -> None:
    oracle: Oracle = ask_transformers(asked, len(LENGTHS))
    answers = await check_answers(stack.target, oracle)
    assert {answer.timings.transport for answer in answers} == {"gloo"}
    assert all(answer.timings.transfer_bytes for answer in answers[: len(LENGTHS)])
    for name in ("prefill-0", "decode-0"):
        addresses = listening(stack.processes[name].pid)
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        # the internal server, this rank of the group, and with --transport auto the port for KV over TCP
        assert len(addresses) == (3 if name == "prefill-0" else 2)
    [link] = [link for worker in stack.status().workers if worker.load for link in worker.load.links]
    assert (link.transport, link.fallback) == ("gloo", "") and link.gb_per_s > 0
    stack.wait_idle()
