"""Equivalent states of one request. Pure.

Two states are equivalent, after the same faults, if they use the same workers, if their requests have ended in the same
way or not at all, and if every step and every death leads from one to a state that is equivalent to one after the same
kind of step or the same death from the other (the coarsest bisimulation). Other requests share only workers and faults,
so they cannot tell equivalent states apart: a cluster of representatives has the same ends, and stops early exactly if
the cluster of all states does.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton.lab.protocol.explorer import RequestGraph, Spent, is_final, use_of
from baton.lab.protocol.participants import MoveKind

Numbers = npt.NDArray[np.int64]


def representatives(graph: RequestGraph, faults: Sequence[Spent]) -> Numbers:
    """Return by spent faults, in the order of `faults`, the first of the states that are equivalent to each state."""
    steps, deaths = _arrays(graph)
    visible = np.array([(*use_of(each, graph.shape), is_final(each), each.client) for each in graph.states])
    classes: dict[Spent, Numbers] = {}
    for spent in sorted(faults, reverse=True):
        classes[spent] = _classes(visible, steps, deaths, classes, spent)
    return np.stack([_first_of(classes[spent]) for spent in faults])


def _arrays(graph: RequestGraph) -> tuple[Numbers, Numbers]:
    """Return the steps as rows of state, state after it and kind, and the states after each death."""
    steps = [
        (number, after, 2 * kind + graph.begins_attempt(number, after))
        for number, each in enumerate(graph.steps)
        for after, kind in each
    ]
    most = max(map(len, graph.deaths))
    deaths = [each or (number,) * most for number, each in enumerate(graph.deaths)]
    return np.array(steps, dtype=np.int64), np.array(deaths, dtype=np.int64).reshape(len(graph), most)


def _classes(
    visible: Numbers, steps: Numbers, deaths: Numbers, later: Mapping[Spent, Numbers], spent: Spent
) -> Numbers:
    """Split states by what is visible, and by the classes after a fault and after a step, until nothing is split."""
    is_mishap = steps[:, 2] // 2 == MoveKind.MISHAP
    known = [visible]
    if (after_death := later.get(spent._replace(deaths=spent.deaths + 1))) is not None:
        known.append(after_death[deaths])
    if (after_mishap := later.get(spent._replace(mishaps=spent.mishaps + 1))) is not None:
        known += [after_mishap[:, None], _sets(steps[is_mishap], after_mishap)]
    own, classes = steps[~is_mishap], _numbered(np.concatenate(known, axis=1))
    while True:
        finer = _numbered(np.concatenate([classes[:, None], _sets(own, classes)], axis=1))
        if finer.max() == classes.max():
            return classes
        classes = finer


def _sets(steps: Numbers, classes: Numbers) -> Numbers:
    """Return for each state the set of kind and class of its steps, as a sorted row that is padded with -1."""
    found = np.unique(np.stack([steps[:, 0], steps[:, 2], classes[steps[:, 1]]], axis=1), axis=0)
    place = np.arange(len(found)) - np.searchsorted(found[:, 0], found[:, 0])
    rows = np.full((len(classes), place.max(initial=0) + 1), -1, dtype=np.int64)
    rows[found[:, 0], place] = found[:, 1] * (classes.max() + 1) + found[:, 2]
    return rows


def _numbered(rows: Numbers) -> Numbers:
    """Return a number for each row, equal for equal rows."""
    return np.asarray(np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1), dtype=np.int64)


def _first_of(classes: Numbers) -> Numbers:
    """Return the first state of the class of each state."""
    return np.asarray(np.unique(classes, return_index=True)[1][classes], dtype=np.int64)
