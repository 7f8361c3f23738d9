"""Work for a GPU goes to that GPU, whatever the current device of the thread is. CUDA is stood in for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton.engine.models.batch import Batch, make_batch
from baton.engine.request import Chunk, Plan
from baton.engine.runner import cuda_graphs
from baton.engine.runner import runner as runners
from baton.engine.runner.cuda_graphs import GraphSizes
from baton.engine.runner.runner import Runner
from baton.kernels.triton.launch import KernelCall
from baton.kernels.types import KvPages
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.host_recorder import HostRecorder
from tests.fixtures.paged import CPU, PagedModel

SECOND = torch.device("cuda", 1)
STEP = Plan((Chunk(0, [1, 2, 3], 0, [0]),))


class Computing(Exception):
    """The model was reached."""


class SecondGpu:
    """A model that says it is on the second GPU; notes the current device where it would compute."""

    device, dtype = SECOND, torch.float32

    def __init__(self, paged: PagedModel, current: list[int]) -> None:
        self.config = paged.model.config
        self.seen: list[int] = []
        self._current = current

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        self.seen.append(self._current[-1])
        raise Computing

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no step comes this far")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device of this thread last, as `torch.cuda` would have it."""
    devices = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        devices.append(device.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(runners, "make_batch", lambda chunks, tokens, device, *rest: make_batch(chunks, tokens, CPU))
    return devices


@pytest.fixture
def model(current: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, SecondGpu]:
    paged = PagedModel(make_checkpoint(tmp_path, "llama"), blocks=2)
    monkeypatch.setattr(KvPages, "device", SECOND)
    model = SecondGpu(paged, current)
    return Runner(model, paged.layout, paged.kv), model


@pytest.mark.parametrize(
    "compute",
    [
        lambda runner: runner.run(STEP),
        lambda runner: runner.launch(STEP),
        lambda runner: runner.follow(STEP),
        lambda runner: runner.warm_up(),
        lambda runner: runner.record(GraphSizes(1, 1), HostRecorder()),
    ],
    ids=["run", "launch", "follow", "warm up", "record"],
)
def test_runner_computes_on_its_models_device(
    compute: Callable[[Runner], object], model: tuple[Runner, SecondGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, gpu = model
    memory = cuda_graphs._StepMemory
    monkeypatch.setattr(cuda_graphs, "_StepMemory", lambda *sizes: memory(*sizes[:-1], CPU))
    with pytest.raises(Computing):
        compute(runner)
    assert gpu.seen == [SECOND.index]


class OnSecondGpu(torch.Tensor):
    is_cuda, device = True, SECOND


def test_kernel_is_not_started_on_another_gpu_than_its_tensors(current: list[int]) -> None:
    started: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **arguments: started.append(grid)

    call = KernelCall(Kernel(), (3,), {"rows": 7, "data": torch.zeros(1).as_subclass(OnSecondGpu)}, warps=4)
    with pytest.raises(RuntimeError, match="kernel for cuda:1 started while cuda:0 is the current device"):
        call.start()
    assert started == []
    with torch.cuda.device(SECOND):
        call.start()
    assert started == [(3,)]
