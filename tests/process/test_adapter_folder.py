"""`--adapter NAME=FOLDER`: several flags, one variable, and what is refused."""

from pathlib import Path

import pytest

from baton.process.config import ConfigError, read_config
from baton.process.registry.worker_record import AdapterFolder, parse_adapters
from baton.worker.config import WorkerConfig

WORKER = ["--worker-id", "w", "--model", "/m", "--model-name", "base"]
BOTH = (AdapterFolder("sql", Path("/a/sql")), AdapterFolder("team/chat:2", Path("/b=c, d")))


def test_flag_may_be_given_several_times() -> None:
    config = read_config(WorkerConfig, [*WORKER, "--adapter", "sql=/a/sql", "--adapter", "team/chat:2=/b=c, d"])
    assert config.adapter == BOTH


def test_variable_separates_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ADAPTER", "sql=/a/sql, chat=/b")
    assert read_config(WorkerConfig, WORKER).adapter == (BOTH[0], AdapterFolder("chat", Path("/b")))


def test_no_adapters_without_a_folder() -> None:
    assert read_config(WorkerConfig, WORKER).adapter == ()


@pytest.mark.parametrize("text", ["sql", "=/a", "sql=", "-x=/a", "a b=/a", f"{'n' * 129}=/a"])
def test_malformed_adapter_pair_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=FOLDER"):
        parse_adapters([text])


def test_name_is_given_once_and_is_not_the_models() -> None:
    with pytest.raises(ConfigError, match=r"--adapter \(BATON_ADAPTER\).*'sql' is given twice"):
        read_config(WorkerConfig, [*WORKER, "--adapter", "sql=/a", "--adapter", "sql=/b"])
    with pytest.raises(ConfigError, match="the name 'base' is the model's"):
        read_config(WorkerConfig, [*WORKER, "--adapter", "base=/a"])


def test_adapter_folder_prints_as_written() -> None:
    assert parse_adapters([str(each) for each in BOTH]) == BOTH
