"""LoRA adapters and replacement weights in the engine of one model, on all its ranks.

Any thread may read their files; the engine's thread adds and removes them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from baton.engine.config.model_config import ModelError
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import LoraWeights, read_named
from baton.engine.models.batch import Model
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.other_ranks import OtherRanks
from baton.engine.parallel.wire import AdapterToAdd
from baton.engine.prepare import PreparedModel
from baton.engine.reload.runners import RunnersByWeights
from baton.engine.reload.weights import CheckedWeights, check_memory, check_weights, load_beside
from baton.engine.runner.runner import Runner
from baton.process.registry.worker_record import WEIGHTS, weights_digest


@dataclass(slots=True)
class ReadWeights:
    """Replacement weights from a checkpoint whose files were checked. `model` is None until they are loaded."""

    checked: CheckedWeights
    model: Model | None = None


@dataclass(slots=True)
class Read:
    """Adapter or weights that were read but are not in the engine yet."""

    name: str
    folder: Path
    digest: str
    content: LoraWeights | ReadWeights


@dataclass(slots=True)
class EngineWeights:
    """The engine's model, and the sets of weights that may replace those loaded at start."""

    prepared: PreparedModel
    runner: Runner
    sets: RunnersByWeights | None = None
    numbers: set[int] = field(default_factory=lambda: {0})

    def check(self, folder: Path) -> ReadWeights:
        """Check that the checkpoint in `folder` can replace the weights. Raises: ModelError."""
        return ReadWeights(check_weights(self.prepared, folder))


class EngineAdapters:
    """LoRA adapters in the engine of one model. Each has the same number on all ranks."""

    def __init__(
        self, adapters: AdapterSet, other_ranks: OtherRanks | None, weights: EngineWeights | None = None
    ) -> None:
        """Create the collection. `adapters`: adapters on the leading rank. `weights` None: the model's weights cannot
        be replaced.
        """
        self._adapters = adapters
        self._other_ranks = other_ranks
        self._weights = weights

    @property
    def started_weights(self) -> str:
        """Return the digest of the weights that were loaded at start; empty if weights cannot be replaced."""
        return "" if self._weights is None else weights_digest(self._weights.prepared.checkpoint)

    def read(self, name: str, folder: Path) -> Read:
        """Read an adapter, or check the files of a set of weights. Blocks. Raises: ModelError."""
        if name != WEIGHTS:
            read = read_named(name, folder)
            return Read(name, folder, read.digest, read.adapter)
        if self._weights is None:
            raise ModelError("the weights of this worker cannot be replaced while it runs")
        weights = self._weights.check(folder)
        return Read(name, folder, weights_digest(weights.checked.checkpoint), weights)

    def load(self, read: Read, between_steps: Callable[[Callable[[], None]], None]) -> None:
        """Load replacement weights while steps continue; do nothing for an adapter. Blocks: call it on a thread other
        than the engine's. Raises: ModelError, RankLost.

        `between_steps` runs a function on the engine's thread and waits for it.
        """
        weights, content, others = self._weights, read.content, self._other_ranks
        if weights is None or not isinstance(content, ReadWeights):
            return
        options = weights.prepared.options
        check_memory(content.checked.size_bytes, options.device, options.tensor_parallel)
        if others is not None:
            between_steps(lambda: others.read_weights(str(read.folder.resolve())))
        try:
            content.model = load_beside(weights.prepared, content.checked, weights.runner.model)
            if check_weights(weights.prepared, read.folder).checkpoint != content.checked.checkpoint:
                raise ModelError(f"{read.folder} was changed while it was read; try again")
        except ModelError:
            if others is not None:
                between_steps(lambda: others.read_weights(""))
            raise

    def add(self, read: Read) -> int:
        """Add an adapter or loaded weights, and return the number by which requests in the engine refer to it. Steps
        wait while the other ranks read the adapter.

        Raises: ModelError, after which no rank has the adapter; RankLost.
        """
        if isinstance(read.content, LoraWeights):
            return self._add_adapter(read, read.content)
        if self._weights is None or read.content.model is None:
            raise RuntimeError("weights must be loaded before they are added")
        return self._add_weights(self._weights, read.content.model)

    def _add_adapter(self, read: Read, adapter: LoraWeights) -> int:
        number = self._adapters.add(read.name, adapter)
        if self._other_ranks is not None:
            try:
                self._other_ranks.add_adapter(AdapterToAdd(read.name, str(read.folder), read.digest), number)
            except (ModelError, RankLost):
                self._adapters.remove(number)
                raise
        return number

    def _add_weights(self, weights: EngineWeights, model: Model) -> int:
        number = self._adapters.skip()
        if self._other_ranks is not None:
            self._other_ranks.add_weights(number)
        weights.sets = weights.sets or RunnersByWeights(weights.runner)
        weights.sets.add(number, model)
        weights.numbers.add(number)
        return number

    def remove(self, number: int) -> None:
        """Remove an adapter or a set of weights. Raises: RankLost."""
        weights = self._weights
        if weights is None or weights.sets is None or number not in weights.numbers:
            self._adapters.remove(number)
            if self._other_ranks is not None:
                self._other_ranks.remove_adapter(number)
            return
        if self._other_ranks is not None:
            self._other_ranks.remove_weights(number)
        weights.sets.remove(number)
        weights.numbers.discard(number)
