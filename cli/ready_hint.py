"""The lines that `baton up` prints when it is ready: its ports, and commands that work when pasted. Pure."""

import shlex
from pathlib import Path

from cli.connection import API_KEY_VARIABLE, TLS_CA_VARIABLE
from cli.options import admin_target_of
from cli.process_plan import LOOPBACK, UpSettings, router_ports


def ready_lines(settings: UpSettings, command: str, default_target: str, chats: bool) -> list[str]:
    """`default_target`: the target of the other commands without --target. `chats`: the model has a chat template."""
    target, admin = router_target(settings), f"{LOOPBACK}:{settings.admin_port}"
    host = target.rpartition(":")[0]
    scheme = "http" if settings.exposure.tls_cert is None else "https"
    lines = [
        f"  endpoint  {target}   (gRPC, baton.v1.BatonService)",
        f"  HTTP      {scheme}://{host}:{settings.http_ports[0]}/v1   (OpenAI's API)",
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


def script_command(root: Path, current: Path) -> str:
    """How the user calls `baton` from the folder `current`."""
    return "./baton" if root == current else shlex.quote(str(root / "baton"))


def _variables(settings: UpSettings) -> str:
    """A key is only in the hands of its user. The certificate vouches for itself, under any authority."""
    given = [f"{API_KEY_VARIABLE}=..."] if settings.exposure.api_keys is not None else []
    if settings.exposure.tls_cert is not None:
        given.append(f"{TLS_CA_VARIABLE}={shlex.quote(str(settings.exposure.tls_cert.absolute()))}")
    return "".join(f"{variable} " for variable in given)
