"""schemathesis over /openapi.json: whatever it thinks of, nothing ends with a 5xx, and every answer is as described."""

import re
from typing import Any

from benchmarks.clients.environments import program
from benchmarks.clients.run import Run

EXAMPLES = 60  # of each route
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def run_schemathesis(run: Run) -> dict[str, Any]:
    """Raises: RuntimeError where a check failed."""
    command = [str(program(run.environments, "schemathesis", "schemathesis")), "run", f"{run.url}/openapi.json"]
    command += ["--url", run.url, "--checks", CHECKS, "--max-examples", str(EXAMPLES), "--no-color"]
    command += ["--request-timeout", "60", "--seed", "7"]
    output = run.client(command, 900)
    counted = re.findall(r"^\s*(.*?(?:generated|passed|tested).*)$", output, re.MULTILINE)
    return {"told": [line.strip() for line in counted]}
