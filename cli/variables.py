"""Variables in the environment of `baton up`: one that is set holds, or is refused. Pure.

A process reads BATON_X where it is given no flag --x, and `up` gives its processes flags. So each option of `up` reads
the variable of its name too (`options.VARIABLES_PREFIX`), and variables that `up` decides by itself may not be set.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from cli.errors import CommandFailed
from cli.options import VARIABLES_PREFIX
from cli.processes import ProcessSpec


def refuse_overridden(
    specs: Sequence[ProcessSpec], environment: Mapping[str, str], own_options: Collection[str]
) -> None:
    """`own_options`: those of `up`, by name, which have read their variables themselves.

    Raises: CommandFailed.
    """
    read = {variable_of(name) for name in own_options}
    for spec in specs:
        for flag, value in given_flags(spec):
            variable = variable_of(flag)
            wanted = environment.get(variable)
            if wanted and variable not in read and wanted != value:
                given = flag if value is None else f"{flag} {value}"
                raise CommandFailed(
                    f"{variable} is {wanted!r}, but `up` itself starts {spec.name} with {given}; unset the variable, "
                    "or start the processes yourself (docs/deployment.md)"
                )


def separated(given: Sequence[str], name: str, environment: Mapping[str, str]) -> Sequence[str]:
    """Values of an option that may be given several times. A variable has commas between them, as processes read it;
    it comes split at white space.
    """
    text = environment.get(variable_of(name), "")
    return text.split(",") if text and list(given) == text.split() else given


def variable_of(flag: str) -> str:
    """Of a flag, or of an option's name."""
    return f"{VARIABLES_PREFIX}_{flag.removeprefix('--').replace('-', '_').upper()}"


def given_flags(spec: ProcessSpec) -> Iterator[tuple[str, str | None]]:
    """Each flag of one of our processes, and its value if it has one."""
    arguments = spec.command[spec.command.index("-m") + 2 :]
    for place, flag in enumerate(arguments):
        if flag.startswith("--"):
            following = arguments[place + 1] if place + 1 < len(arguments) else "--"
            yield flag, None if following.startswith("--") else following
