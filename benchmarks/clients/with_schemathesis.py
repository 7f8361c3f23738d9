"""schemathesis over /openapi.json: whatever it thinks of, nothing ends with a 5xx, and answers are as described.

Its chats name no length: the service should have a short context.
"""

import re
from typing import Any

from baton.benchmarks.clients.run import Run, program

EXAMPLES = 20  # of each route, beside those that cover the schemas
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def run_schemathesis(run: Run) -> dict[str, Any]:
    """Raises: RuntimeError where a check failed."""
    command = [str(program(run.environments, "schemathesis", "schemathesis")), "run", f"{run.url}/openapi.json"]
    command += ["--url", run.url, "--checks", CHECKS, "--max-examples", str(EXAMPLES), "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--seed", "7"]
    output = run.client(command, 900)
    counted = re.search(r"Test cases:\s*(.*)", output)
    return {"test_cases": counted[1] if counted else output[-500:]}
