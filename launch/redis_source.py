"""The Redis of `baton up`: the one that REDIS_URL names, else a server of our own under the supervisor."""

from dataclasses import dataclass
from pathlib import Path

from baton.launch.errors import CommandFailed
from baton.launch.processes import ProcessSpec, Stage
from baton.service.registry.redis_server import (
    NOISE,
    RedisServerError,
    find_redis_server,
    free_port,
    redis_command,
    redis_url,
)

REDIS_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class RedisSource:
    """`spec` is None where Redis is run elsewhere."""

    url: str
    spec: ProcessSpec | None

    @property
    def description(self) -> str:
        return self.url if self.spec is None else f"{Path(self.spec.command[0]).name} (embedded)"


def choose_redis(given_url: str | None, cores: tuple[int, ...]) -> RedisSource:
    """Raises CommandFailed where none is given and none is installed."""
    if given_url:
        return RedisSource(given_url, None)
    try:
        program = find_redis_server()
    except RedisServerError as error:
        raise CommandFailed(str(error)) from error
    port = free_port()
    command = tuple(redis_command(program, port))
    spec = ProcessSpec("redis", command, Stage.REDIS, REDIS_GRACE_S, cores=cores, noise=NOISE)
    return RedisSource(redis_url(port), spec)
