"""When weights are replaced: what new requests get, what becomes of those that run, and what is refused."""

import asyncio

import pytest

from baton.process.errors import Aborted, FailedPrecondition, InvalidArgument
from baton.process.registry.worker_record import WEIGHTS, weights_digest
from baton.protos import session_pb2
from baton.router.fleet.weights import OpenRequests
from baton.router.types.response import TOKEN_CHARACTERS, is_of_version, one_version, resume_token
from baton.router.types.worker import Adapter, ListedAdapter
from tests.router.test_cluster_adapters import Workers

OWN, NEW = weights_digest(b"own"), weights_digest(b"new")


def listed(digest: str, grace_s: float = 0.0) -> ListedAdapter:
    return ListedAdapter(Adapter(WEIGHTS, digest), "/new", grace_s)


async def test_requests_of_replaced_weights_end_after_the_grace_and_others_do_not() -> None:
    ended: list[str] = []
    requests = OpenRequests(lambda: None, lambda adapter: True)
    with (
        requests.using(None, OWN, lambda error: ended.append(error.reason)),
        requests.using(Adapter(WEIGHTS, NEW), OWN, lambda error: None),
    ):
        requests.take(listed(NEW))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert ended == ["MODEL_REPLACED"]


async def test_weights_that_return_within_the_grace_go_on() -> None:
    ended: list[Aborted] = []
    requests = OpenRequests(lambda: None, lambda adapter: True)
    with requests.using(None, OWN, ended.append):
        requests.take(listed(NEW, grace_s=60))
        requests.take(listed(OWN))
        await asyncio.sleep(0)
    assert ended == []


async def test_request_resumed_after_the_grace_ends_immediately() -> None:
    ended: list[Aborted] = []
    requests = OpenRequests(lambda: None, lambda adapter: True)
    with requests.using(None, OWN, ended.append):
        requests.take(listed(NEW))
    with requests.using(None, OWN, ended.append):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(ended) == 1


async def test_all_workers_have_new_weights_before_new_requests_do() -> None:
    workers = Workers()
    workers.digests = dict.fromkeys(workers.digests, NEW)
    assert workers.adapters.open_requests.weights is None
    weights, names = await workers.adapters.reload("/new", 30.0, OWN, b"f")
    assert workers.adapters.open_requests.weights == weights == Adapter(WEIGHTS, NEW)
    assert names == ["p", "d"]
    assert workers.adapters.views() == []
    assert [each.grace_s for each in workers.lists("p")[-1].adapters] == [30.0]


async def test_weights_of_the_start_are_in_force_already() -> None:
    workers = Workers()
    workers.digests = dict.fromkeys(workers.digests, OWN)
    await workers.adapters.reload("/own", 30.0, OWN, b"f")
    assert workers.adapters.open_requests.weights is None


async def test_if_one_worker_refuses_weights_nothing_changes() -> None:
    workers = Workers()
    workers.digests = {**dict.fromkeys(workers.digests, NEW), "d": ""}
    with pytest.raises(FailedPrecondition, match=r"d cannot load \S+: it is too large"):
        await workers.adapters.reload("/new", 30.0, OWN, b"f")
    assert workers.adapters.open_requests.weights is None
    assert sorted(workers.drops()) == ["d", "p"]


async def test_adapters_and_other_weights_exclude_each_other() -> None:
    workers = Workers()
    await workers.load()
    with pytest.raises(FailedPrecondition, match="are loaded: sql"):
        await workers.adapters.reload("/new", 30.0, OWN, b"f")
    await workers.adapters.unload("sql", 0.0)
    await workers.adapters.reload("/new", 30.0, OWN, b"f")
    with pytest.raises(FailedPrecondition, match="the weights were replaced by version"):
        await workers.load()


@pytest.mark.parametrize(("path", "grace_s", "field"), [("new", 1.0, "path"), ("/new", 3601.0, "grace_s")])
async def test_bad_reload_requests_are_refused(path: str, grace_s: float, field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        await Workers().adapters.reload(path, grace_s, OWN, b"f")


async def test_request_without_a_worker_of_its_weights_is_rejected_by_name() -> None:
    workers = Workers()
    workers.digests = dict.fromkeys(workers.digests, NEW)
    await workers.adapters.reload("/new", 30.0, OWN, b"f")
    assert workers.adapters.open_requests.gone(None) is None
    for endpoint in "pd":
        sent = workers.lists(endpoint)[-1]
        freed = session_pb2.AdapterState(
            version=sent.version, listed=sent.adapters, usable=sent.adapters, own_weights_freed=True
        )
        workers.adapters.on_state(endpoint, freed)
    gone = workers.adapters.open_requests.gone(None)
    assert gone is not None
    assert gone.reason == "MODEL_REPLACED"
    assert workers.adapters.open_requests.gone(workers.adapters.open_requests.weights) is None


def test_token_of_a_stream_says_which_weights_began_it() -> None:
    token = resume_token("0123456789abcdef")
    assert len(token) == TOKEN_CHARACTERS
    assert is_of_version(token, "0123456789abcdef")
    assert not is_of_version(token, "1123456789abcdef")
    assert token != resume_token("0123456789abcdef")


def test_one_call_has_one_version() -> None:
    assert one_version(["a", "a"]) == "a"
    with pytest.raises(Aborted, match="between the prompts"):
        one_version(["a", "b"])
