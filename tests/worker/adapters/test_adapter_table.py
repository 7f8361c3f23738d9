"""Which adapter a request means, and what becomes of one that is listed no more."""

import pytest

from baton.process.wire_bounds import MAX_EXACT
from baton.worker.adapters.table import AdapterKey, AdapterOrigin, AdapterTable, Listed

OLD, NEW, OTHER = AdapterKey("sql", "old"), AdapterKey("sql", "new"), AdapterKey("chat", "other")


def listed(*keys: AdapterKey) -> list[Listed]:
    return [Listed(key, f"/{key.digest}") for key in keys]


@pytest.fixture
def table() -> AdapterTable:
    """With OLD and OTHER listed."""
    table = AdapterTable()
    for number, key in enumerate((OLD, OTHER), start=1):
        table.add(key, number, AdapterOrigin.PREPARED)
    assert table.take_list(1, listed(OLD, OTHER))
    return table


def test_request_without_a_name_has_no_adapter(table: AdapterTable) -> None:
    assert table.number("") == 0


def test_request_finds_its_adapter_by_name_and_digest(table: AdapterTable) -> None:
    assert (table.number("sql", "old"), table.number("chat", "other")) == (1, 2)
    for name, digest in (("sql", "new"), ("nothing", "old"), ("nothing", "")):
        with pytest.raises(ValueError, match=f"adapter '{name}' is not loaded"):
            table.number(name, digest)


def test_prepared_adapter_is_not_requestable(table: AdapterTable) -> None:
    table.add(NEW, 3, AdapterOrigin.PREPARED)
    with pytest.raises(ValueError, match="adapter 'sql' is not loaded"):
        table.number("sql", "new")


def test_two_adapters_of_a_name_serve_their_own_requests(table: AdapterTable) -> None:
    table.add(NEW, 3, AdapterOrigin.PREPARED)
    assert table.take_list(2, listed(NEW, OTHER))
    assert (table.number("sql", "old"), table.number("sql", "new")) == (1, 3)
    assert [each.key for each in table.of(AdapterOrigin.RETIRED)] == [OLD]


def test_router_without_a_digest_gets_the_only_adapter_ever_of_that_name(table: AdapterTable) -> None:
    assert table.number("sql") == 1
    table.add(NEW, 3, AdapterOrigin.LISTED)
    table.drop(table.of(AdapterOrigin.LISTED)[0])
    with pytest.raises(ValueError, match="adapter 'sql' is ambiguous"):
        table.number("sql")


def test_table_ignores_a_list_of_a_future_version_and_takes_the_next(table: AdapterTable) -> None:
    assert not table.take_list(MAX_EXACT, listed(OLD))
    assert table.take_list(2, listed(OTHER))
    assert table.version == 2


def test_older_list_changes_nothing(table: AdapterTable) -> None:
    assert table.take_list(5, listed(OLD))
    for version in (4, 5):
        assert not table.take_list(version, listed(OTHER))
    assert [each.key for each in table.listed] == [OLD]


def test_relisted_adapter_is_no_longer_retired(table: AdapterTable) -> None:
    assert table.take_list(2, [])
    assert table.take_list(3, listed(OLD, NEW))
    assert [each.key for each in table.of(AdapterOrigin.LISTED)] == [OLD]
    assert [each.key for each in table.missing] == [NEW]


def test_startup_adapters_stay_despite_the_list(table: AdapterTable) -> None:
    table.add(NEW, 3, AdapterOrigin.STARTED)
    assert table.take_list(2, [])
    assert [each.key for each in table.of(AdapterOrigin.STARTED)] == [NEW]
