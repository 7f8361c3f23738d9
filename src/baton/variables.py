"""BATON_* variables that no process of ours knows, since a misspelled one would change nothing, without a word.

Every folder may import this module. It loads the configurations of all processes only when it looks for such variables.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module

PREFIX = "BATON_"
_CONFIGURATIONS = {"baton.router.config": "RouterConfig", "baton.elastic_worker.config": "ElasticConfig"}
OF_COMMANDS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("API_KEY", "TARGET", "TLS_CA", "PYTHON"),
        *("PREFILL", "DECODE", "COLOCATED", "ROUTERS", "STARTUP_TIMEOUT"),  # of `up`
    )
)
"""Variables of the command line, which are no field of a process."""
_LINK = re.compile(r"BATON_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_URL = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes has set it, for a Service whose name begins with baton."""
    return _LINK.fullmatch(name) is not None or (name.endswith("_PORT") and _LINK_URL.match(value) is not None)


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each, with the nearest name that is known."""
    for name, value in sorted(environment.items()):
        if name.startswith(PREFIX) and name not in known_variables() and not is_service_link(name, value):
            known = sorted(each.removeprefix(PREFIX) for each in known_variables())
            nearest = get_close_matches(name.removeprefix(PREFIX), known, n=1)
            yield f"no process knows the variable {name}" + (f"; did you mean {PREFIX}{nearest[0]}?" if nearest else "")


@cache
def known_variables() -> frozenset[str]:
    found = set(OF_COMMANDS)
    for module, config in _CONFIGURATIONS.items():
        for info in getattr(import_module(module), config).fields.values():
            found |= {info.variable, info.alias, info.former_variable} - {None}
    return frozenset(found)
