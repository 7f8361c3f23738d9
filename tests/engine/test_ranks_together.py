"""What the ranks of a worker agree on before they serve: memory, primitives, recorded steps. Over gloo, on a CPU."""

import gc
import queue
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.kv_cache.memory import CudaMeter, LargestStep, prepare_with_spare_memory
from baton.engine.kv_cache.sizing import GPU_RESERVE_BYTES
from baton.engine.load import load_model, load_part
from baton.engine.lora.adapters import AdapterSet
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.linear import PackedLinear
from baton.engine.parallel import wire
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.model import ParallelModel, SummedLinear
from baton.engine.parallel.rank_process import RankProcess, carry_out
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.wire import RankOptions, RankPool, RankStart, WeightsToRead
from baton.engine.prepare import ModelOptions
from baton.engine.request import BlockCopy, BlockSwap, Chunk, Computed, Plan, Sample
from baton.engine.runner.cuda_graphs import GraphSizes, why_not_recorded
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import draw_bytes
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.host_recorder import HostRecorder
from tests.fixtures.metered_rank import ToldMeter
from tests.fixtures.paged import CPU, PagedModel, random_prompt
from tests.fixtures.perturbed import perturbed

pytestmark = pytest.mark.usefixtures("forked_ranks")
MIB = 1 << 20
METERED = RankOptions(entry="tests.fixtures.metered_rank")
STEP = LargestStep(tokens=20, sequences=3)


def options(folder: Path) -> ModelOptions:
    return ModelOptions(folder, CPU, "float32", 8, 0, max_model_len=64, tensor_parallel=2)


def free_for(pool_bytes: int) -> int:
    """Of a device that has so much left for KV in the end."""
    return pool_bytes + GPU_RESERVE_BYTES // 2 + draw_bytes(STEP.sequences, 512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks"), "llama", num_hidden_layers=2)


def test_rank_with_least_memory_decides_for_all(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TEST_FREE_BYTES", str(free_for(2 * MIB)))
    prepared = prepare_with_spare_memory(
        options(checkpoint), STEP, 1.0, ranks=METERED, meter=lambda device: ToldMeter(free_for(7 * MIB))
    )
    assert prepared.ranks is not None
    small_bytes = 2 * MIB + STEP.tokens // 8 * prepared.layout.block_bytes  # the blocks of the trial are free again
    assert 2 * 2 * MIB <= prepared.pool_bytes <= 2 * small_bytes
    runner = prepared.load(torch.zeros(prepared.storage_bytes, dtype=torch.uint8), progress=False)
    try:
        assert prepared.ranks.take() is None  # the runner alone keeps them
        whole, prompt = PagedModel(checkpoint, 8), random_prompt(20)
        plan = Plan((Chunk(0, prompt, 0, whole.blocks(20), (Sample(0, SamplingParams(max_tokens=1)),)),))
        assert tokens(runner, plan) == tokens(whole.runner, plan)
    finally:
        runner.close()


def tokens(runner: Runner, plan: Plan) -> list[int]:
    return [drawn.token_id for result in runner.run(plan) if isinstance(result, Computed) for drawn in result.drawn]


def test_rank_with_no_memory_left_is_named_and_all_end(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TEST_FREE_BYTES", str(free_for(-MIB)))
    with pytest.raises(ModelError, match=r"leaves no room for KV \(rank 1\)"):
        prepare_with_spare_memory(
            options(checkpoint), STEP, 1.0, ranks=METERED, meter=lambda device: ToldMeter(free_for(7 * MIB))
        )


def test_plan_reaches_a_rank_with_all_that_its_layers_need() -> None:
    chunks = (Chunk(7, [5], 3, [2, 4]), Chunk(7, [6], 4, [2, 4], is_draft=True), Chunk(8, [1, 2], 0, [3], adapter=2))
    plan = Plan(chunks, (BlockCopy(1, 2),), (BlockSwap(3, 0),), (BlockSwap(5, 1),))
    read = wire.plan_of(wire.plan_bytes(plan))
    assert read == plan


def test_leaders_description_of_a_model_equals_a_ranks() -> None:
    start = RankStart("folder", "cpu", "float32", "int8", 2, None, "entry", 3, rank=1)
    assert RankStart.of_bytes(start.to_bytes()) == start


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("quantize", ["none", "int8", "int4", "fp8"])
def test_weights_of_a_rank_are_stored_like_those_of_one_rank(checkpoint: Path, tmp_path: Path, quantize: str) -> None:
    alone = Collectives(Shard(0, 1), tmp_path / "meeting", CPU)
    for dtype in (torch.float32, torch.bfloat16):
        part = load_part(checkpoint, dtype, CPU, False, quantize, alone)
        whole = load_model(checkpoint, dtype, CPU, False, quantize=quantize, packed=True)
        assert isinstance(whole, DecoderModel)
        output = part.layers[1].output
        assert isinstance(output, SummedLinear)
        pairs = (
            (part.head, whole.head),
            (part.layers[0].qkv, whole.layers[0].qkv),
            (output.part, whole.layers[1].output),
        )
        for own, other in pairs:
            assert type(own) is type(other)
            if isinstance(own, PackedLinear) and isinstance(other, PackedLinear):
                assert own.weight.stored is other.weight.stored
                assert torch.equal(own.weight.data, other.weight.data)
    alone.close()


def test_sums_over_gloo_are_not_recorded(checkpoint: Path, tmp_path: Path) -> None:
    alone = Collectives(Shard(0, 1), tmp_path / "meeting", CPU)
    model = ParallelModel(load_part(checkpoint, torch.float32, CPU, False, "none", alone), alone, lambda rows: None)
    assert why_not_recorded(model) == "sums over gloo cannot be part of a graph"
    alone.close()


class TwoRanks:
    """Both ranks of a model, each on a thread of its own, with decode steps recorded."""

    def __init__(self, checkpoint: Path, meeting: Path) -> None:
        self._checkpoint, self._meeting = checkpoint, meeting
        self._announced: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.recorders = HostRecorder(), HostRecorder()
        self.failed: list[BaseException] = []

    def run(self, plans: list[Plan]) -> list[list[int]]:
        """What each plan draws."""
        found: list[list[int]] = []

        def lead() -> None:
            runner, _ = self._ready(0)
            found.extend(tokens(runner, plan) for plan in plans)

        def follow() -> None:
            runner, model = self._ready(1)
            for plan in plans:
                runner.follow(plan)
                if any(chunk.samples for chunk in plan.chunks):
                    rows = self._announced.get(timeout=20)
                    with torch.inference_mode():
                        model.logits_together(torch.empty(rows, model.config.hidden_size))

        threads = [threading.Thread(target=self._kept, args=(part,)) for part in (lead, follow)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert not self.failed
        return found

    def _kept(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:  # noqa: BLE001 -- told on the other thread
            self.failed.append(error)

    def _ready(self, rank: int) -> tuple[Runner, ParallelModel]:
        collectives = Collectives(Shard(rank, 2), self._meeting, CPU)
        part = load_part(self._checkpoint, torch.float32, CPU, False, "none", collectives)
        model = ParallelModel(part, collectives, self._announced.put)
        layout = kv_layout(model.config, torch.float32, 8)
        runner = Runner(model, layout, layout.view(torch.zeros(16 * layout.block_bytes, dtype=torch.uint8), 16))
        runner.record(GraphSizes(4, 4), self.recorders[rank])
        self.recorders[rank].replays = 0
        return runner, model


def test_ranks_replay_recorded_steps_together(checkpoint: Path, tmp_path: Path) -> None:
    sample = (Sample(0, SamplingParams(max_tokens=9)),)
    prompts = [random_prompt(11), random_prompt(6)]
    tables = [[0, 1, 2], [3, 4, 5]]
    plans = [Plan(tuple(Chunk(index, prompt, 0, tables[index], sample) for index, prompt in enumerate(prompts)))]
    for step in range(4):
        chunks = [
            Chunk(index, [40 + step], len(prompt) + step, tables[index], sample) for index, prompt in enumerate(prompts)
        ]
        plans.append(Plan(tuple(chunks[: 2 - step // 2])))
    ranks, whole = TwoRanks(checkpoint, tmp_path / "meeting"), PagedModel(checkpoint, 8, 16)
    assert ranks.run(plans) == [tokens(whole.runner, plan) for plan in plans]
    assert [recorder.replays for recorder in ranks.recorders] == [4, 4]


class NotingRunner:
    """Notes what it is asked, and what has been said on the connection by then."""

    def __init__(self, said: socket.socket) -> None:
        self.noted: list[tuple[str, bool]] = []
        self._said = said

    def follow(self, plan: Plan) -> None:
        self._note("follow")

    def settle(self) -> None:
        self._note("settle")

    def _note(self, what: str) -> None:
        self._said.setblocking(False)
        try:
            has_said = bool(self._said.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            has_said = False
        self.noted.append((what, has_said))


def test_rank_reports_moved_blocks_after_its_device_moved_them() -> None:
    leader, own = socket.socketpair()
    with leader, own:
        runner = NotingRunner(leader)
        carry_out(own, runner, Plan((Chunk(0, [1], 0, [0]),), (BlockCopy(0, 1),)))
        assert runner.noted == [("follow", False)]  # its first sum tells
        carry_out(own, runner, Plan((), (BlockCopy(0, 1),)))
        assert runner.noted[1:] == [("follow", False), ("settle", False)]
        leader.setblocking(True)
        assert wire.receive(leader).kind == wire.MOVED


def test_rank_frees_the_weights_that_were_replaced(checkpoint: Path, tmp_path: Path) -> None:
    leader, connection = socket.socketpair()
    old, process = rank_alone(checkpoint, tmp_path, connection)
    other = perturbed(checkpoint, tmp_path / "other", seed=1)
    commands = [
        (wire.POOL, RankPool("float32", 8, 4, 0).to_bytes()),
        (wire.READ_WEIGHTS, WeightsToRead(str(other)).to_bytes()),
        (wire.ADD_WEIGHTS, (1).to_bytes(8, "little")),
    ]
    with leader, connection:
        for kind, payload in (*commands, (wire.REMOVE_WEIGHTS, (0).to_bytes(8, "little"))):
            wire.send(leader, kind, payload)
        leader.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.Closed):
            process.follow()
        assert [wire.receive(leader).kind for _ in range(2)] == [wire.READY, wire.READY]  # the pool, the weights
    gc.collect()
    assert old() is None


def rank_alone(
    checkpoint: Path, tmp_path: Path, connection: socket.socket
) -> tuple["weakref.ref[torch.Tensor]", RankProcess]:
    """The only rank of its worker, and the weight of a norm that it begins with."""
    collectives = Collectives(Shard(0, 1), tmp_path / "meeting", CPU)
    part = load_part(checkpoint, torch.float32, CPU, False, "none", collectives)
    model = ParallelModel(part, collectives, announce_logits=lambda rows: None)
    start = RankStart(str(checkpoint), "cpu", "float32", "none", 1, None, "", 0)
    process = RankProcess(connection, start, model, AdapterSet(), None, CudaMeter)
    return weakref.ref(part.norm.weight), process
