"""Lets several processes share the tests of a GPU out among themselves: what takes time is compiling their kernels."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="I/N: every N-th test, from the I-th on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, str(config.getoption("--part")).split("/"))
    items[:] = items[part - 1 :: parts]
