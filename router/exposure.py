"""How far the router's ports reach, and their protection. Pure."""

from collections.abc import Iterable
from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there. Unknown for a host name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def too_open(public_hosts: Iterable[str], admin_host: str, has_keys: bool) -> str:
    """The risk that is allowed only on purpose; empty where there is none."""
    if not is_loopback(admin_host):
        return (
            f"--admin-host {admin_host}: the admin port has no authentication, so every host that reaches it can use it"
        )
    beyond = [host for host in public_hosts if not is_loopback(host)]
    if beyond and not has_keys:
        return f"listening on {beyond[0]} without --api-keys accepts every client that reaches it"
    return ""


def warnings(public_hosts: Iterable[str], admin_host: str, has_keys: bool, has_tls: bool) -> list[str]:
    """The warnings that the router logs when it starts."""
    hosts = tuple(public_hosts)
    found = []
    if (risk := too_open(hosts, admin_host, has_keys)) != "":
        found.append(f"INSECURE (--insecure): {risk}")
    elif not has_keys:
        found.append(
            "no API keys: every process on this machine may send requests (--api-keys FILE, baton keys new NAME)"
        )
    if has_keys and not has_tls and not all(map(is_loopback, hosts)):
        found.append("API keys and prompts travel unencrypted; --tls-cert and --tls-key turn TLS on")
    return found
