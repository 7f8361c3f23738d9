"""Command `baton replay`: replays the record of a bundle, and predicts its times to first token after a change.

`truth`: bundle of a run in which the change was made. `engine`: model that computes the recorded steps.
"""

import json
import subprocess
import sys
from pathlib import Path

from baton import child_environment
from baton.lab.replay.decisions import check_placements
from baton.lab.replay.engine import RecordedModel, check_results
from baton.lab.replay.past import past_predictions
from baton.lab.replay.predict import PredictedRequest, WhatIf, scenario_of
from baton.lab.replay.record import read_record
from baton.lab.replay.report import ReplayResult, as_json, as_text
from baton.lab.replay.steps import check_steps
from baton.lab.simulation.campaign import HASH_SEED
from baton.launch import CommandFailed
from baton.router.types.plain import from_plain, to_plain

SIMULATION_S = 3600.0  # maximum time of one simulation


def run_replay(
    bundle: Path, what_if: WhatIf, is_json: bool, truth: Path | None = None, engine: RecordedModel | None = None
) -> int:
    """Replay a bundle; return 1 if a placement or a step differs from the record. Raises: CommandFailed."""
    if truth is not None and not what_if.changes:
        raise CommandFailed("--truth: needs a change; add --without, --add-prefill or --add-decode")
    record = read_record(bundle)
    true = None if truth is None else read_record(truth)
    scenario = scenario_of(record, what_if)
    result = ReplayResult(
        record,
        check_placements(record),
        tuple(check_steps(worker, record.requests) for worker in record.workers),
        {} if scenario is None else {role.value: fit for role, fit in scenario.fits.items()},
        predicted(bundle, WhatIf()),
        what_if,
        predicted(bundle, what_if) if what_if.changes else (),
        None if engine is None else check_results(record, engine),
        true,
        past_predictions() if what_if.changes else None,
    )
    print(json.dumps(as_json(result)) if is_json else as_text(result))
    return 0 if result.is_equal else 1


def predicted(bundle: Path, what_if: WhatIf) -> tuple[PredictedRequest, ...]:
    """Simulate in a process of its own, whose hash seed makes the simulation repeatable. Raises: CommandFailed."""
    environment = child_environment() | {"PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"}
    asked = json.dumps({"bundle": str(bundle), "what_if": to_plain(what_if)})
    command = [sys.executable, "-m", "baton.lab.replay"]
    try:
        done = subprocess.run(
            command, input=asked + "\n", capture_output=True, text=True, env=environment, timeout=SIMULATION_S
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"the simulation of {bundle} took over {SIMULATION_S / 60:.0f} minutes") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CommandFailed(f"the simulation of {bundle} failed: {said[-1] if said else 'no output'}")
    return from_plain(tuple[PredictedRequest, ...], json.loads(done.stdout))
