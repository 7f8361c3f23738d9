"""Flags of a decode worker that has a draft model."""

import pytest

from baton.decode_worker.config import DecodeConfig
from baton.process.config import ConfigError, read_config

FLAGS = ("--worker-id", "decode", "--model", "/models/large", "--host", "127.0.0.1", "--port", "0")


@pytest.mark.parametrize("flags", [("--speculate", "draft"), ("--draft-model", "/models/small")])
def test_draft_model_and_its_use_go_together(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--speculate draft and --draft-model must be set together"):
        read_config(DecodeConfig, [*FLAGS, *flags])


def test_several_ranks_draft_nothing() -> None:
    flags = ["--speculate", "draft", "--draft-model", "/models/small", "--tensor-parallel", "2"]
    with pytest.raises(ConfigError, match="--draft-model needs --tensor-parallel 1"):
        read_config(DecodeConfig, [*FLAGS, *flags])


def test_draft_pool_has_its_own_size() -> None:
    flags = ["--speculate", "draft", "--draft-model", "/models/small", "--draft-kv-memory", "16MiB"]
    config = read_config(DecodeConfig, [*FLAGS, *flags])
    assert int(config.draft_kv_memory) == 16 << 20
