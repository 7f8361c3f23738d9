"""Check whether a model fits the sizes of workers, before any is started or any weight is read.

`python -m baton.engine.check JSON` takes the fields of ModelOptions. It prints the memory of one worker as JSON, or
exits with code 2 and an error on stderr if the sizes do not fit.
"""

import json
import sys
from pathlib import Path
from typing import Any

from baton.engine.config.model_config import ModelError
from baton.engine.drafting.draft_model import draft_options
from baton.engine.kv_cache.memory import ANY_BYTES
from baton.engine.load import device_named
from baton.engine.prepare import ModelOptions, prepare_model

EXIT_UNFIT = 2


def main(text: str) -> int:
    given: dict[str, Any] = json.loads(text)
    draft, kv_bytes = given.pop("draft"), given.pop("kv_memory_bytes")
    given |= {"folder": Path(given["folder"]), "device": device_named(given["device"])}
    options = ModelOptions(**given, kv_memory_bytes=ANY_BYTES if kv_bytes is None else kv_bytes)
    try:
        prepared = prepare_model(options if draft is None else draft_options(options, Path(draft), ANY_BYTES))
    except ModelError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return EXIT_UNFIT
    drafting = 0 if prepared.draft is None else prepared.draft.weight_bytes
    print(json.dumps({"weights": prepared.weight_bytes + drafting}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
