"""`baton bench peers`: ratios within rounds, who is absent, and a peer that speaks the lines and one that dies."""

import json
import sys
import time
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from baton.lab.benchmarks.peers import compare as peers
from baton.lab.benchmarks.peers import process as peers_start
from baton.lab.benchmarks.peers.compare import (
    Contestant,
    PeerState,
    as_picture,
    make_rows,
    order_of,
    run_peers_bench,
    verdict,
)
from baton.lab.benchmarks.peers.drivers import Stepped, ik_llamacpp_times
from baton.lab.benchmarks.peers.lines import RoundWork
from baton.lab.benchmarks.peers.process import (
    OURS,
    MeasuredRound,
    PeerEngine,
    PeerEngineFailed,
    PeerProcess,
    Precision,
    converted_path,
    find_python,
)
from baton.lab.benchmarks.peers.process import CheckpointForm as SourceForm
from baton.lab.commands.bench_options import PeersOptions
from baton.lab.report.statistics import MeanEstimate
from baton.launch import CommandFailed

BF16 = Precision.BF16
WORK = RoundWork(batch=2, prompt_tokens=8, new_tokens=4, seed=1, vocab_size=100)
FAKE = """
import json, os, sys
print(json.dumps({"version": os.getpid()}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if work["batch"] == 3:
        print("out of luck", file=sys.stderr, flush=True)
        sys.exit(1)
    answer = {"prefill_s": SECONDS, "decode_step_s": SECONDS / 2, "first_tokens": [7] * work["batch"]}
    print(json.dumps(answer), flush=True)
"""


class FakeEngine:
    """Engine that admits one sequence per step and generates a token for each running one."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, int]] = []
        self.running: dict[str, int] = {}
        self.begun: set[str] = set()

    def add(self, work: RoundWork, new_tokens: int) -> list[str]:
        names = [f"{new_tokens} {number}" for number in range(work.batch)]
        self.waiting += [(name, new_tokens) for name in names]
        return names

    def step(self) -> None:
        if self.waiting:
            name, tokens = self.waiting.pop(0)
            self.running[name] = tokens
        self.begun |= set(self.running)
        self.running = {name: left - 1 for name, left in self.running.items() if left > 1}


def test_steps_of_an_engine_are_counted_once_every_sequence_has_begun() -> None:
    engine = FakeEngine()
    stepped = Stepped(
        engine.add,
        engine.step,
        lambda: bool(engine.waiting or engine.running),
        lambda names: [name for name in names if name not in engine.begun],
        lambda name: int(name.partition(" ")[2]) + 40,
    )
    found = stepped.run(WORK)
    assert found.first_tokens == [40, 41]
    assert len(found.steps_s) == WORK.new_tokens
    assert found.prefill_s > 0


class DroppingEngine:
    """Ends a request whose handle nothing holds any more, as OpenVINO does. Each step makes a token."""

    def __init__(self) -> None:
        self.left: WeakKeyDictionary[Handle, int] = WeakKeyDictionary()

    def add(self, work: RoundWork, new_tokens: int) -> list["Handle"]:
        handles = [Handle() for _ in range(work.batch)]
        self.left.update(dict.fromkeys(handles, new_tokens))
        return handles

    def step(self) -> None:
        for handle in self.left:
            self.left[handle] -= 1


class Handle:
    """Handle of a request."""


def test_requests_with_first_tokens_are_held_until_their_last_step() -> None:
    engine = DroppingEngine()
    stepped = Stepped(engine.add, engine.step, lambda: any(left > 0 for left in engine.left.values()), lambda _: [], id)
    assert len(stepped.run(WORK).steps_s) == WORK.new_tokens


def test_answers_that_end_early_are_rejected_as_measurement() -> None:
    engine = DroppingEngine()
    stepped = Stepped(
        lambda work, new_tokens: engine.add(work, 1),
        engine.step,
        lambda: any(left > 0 for left in engine.left.values()),
        lambda _: [],
        id,
    )
    with pytest.raises(RuntimeError, match=r"2 answers of \d+ tokens ended after \d+ steps"):
        stepped.run(WORK)


def test_times_of_ik_llama_cpp_come_from_the_last_row_of_its_table() -> None:
    table = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     32 |    1 |    160 |    0.339 |   377.79 |    0.714 |    44.82 |    1.053 |   151.98 |
"""
    assert ik_llamacpp_times(table) == (0.339, 0.714)
    with pytest.raises(RuntimeError, match="out of memory"):
        ik_llamacpp_times("out of memory")


def start(tmp_path: Path, program: str) -> PeerProcess:
    return PeerProcess([sys.executable, "-c", program], {}, [0], tmp_path / "log")


def measured(prefill_s: float, step_s: float, first_tokens: tuple[int, ...] = (1, 2)) -> MeasuredRound:
    return MeasuredRound(prefill_s, step_s, first_tokens)


def test_turns_go_there_and_back() -> None:
    engines = [Contestant(name, BF16, PeerState.MEASURED) for name in "abc"]
    orders = ["".join(each.name for each in order_of(engines, number)) for number in range(3)]
    assert orders == ["abc", "cba", "abc"]


def test_ratios_are_of_the_same_round() -> None:
    rounds = {
        (OURS, BF16, 16): [measured(1.0, 0.010), measured(4.0, 0.040)],
        ("theirs", BF16, 16): [measured(2.0, 0.015), measured(8.0, 0.060, (1, 9))],
        ("theirs", Precision.INT8, 16): [measured(2.0, 0.015)],
    }
    ours, theirs, alone = make_rows(rounds, prompt_tokens=100)
    assert ours.prefill_ratio is None
    assert ours.prefill_tokens_per_s == 640.0
    assert theirs.prefill_ratio is not None and theirs.decode_ratio is not None
    assert theirs.prefill_ratio.low == pytest.approx(2.0) == theirs.prefill_ratio.high
    assert theirs.decode_ratio.low == pytest.approx(1.5) == theirs.decode_ratio.high
    assert theirs.same_first_tokens == 0.75
    assert alone.decode_ratio is None


@pytest.mark.parametrize(
    ("interval", "said"), [((1.1, 1.2), "ahead"), ((0.98, 1.02), "par"), ((0.8, 0.9), "behind"), ((0.9, 1.1), "open")]
)
def test_verdict_takes_the_whole_interval(interval: tuple[float, float], said: str) -> None:
    assert verdict(MeanEstimate(1.0, *interval), rounds=7) == said
    assert verdict(MeanEstimate(1.0, *interval), rounds=2) == "open"


def test_picture_has_a_bar_for_each_peer_and_none_for_baton() -> None:
    rounds = {(OURS, BF16, 1): [measured(1.0, 0.01)], ("theirs", BF16, 1): [measured(2.0, 0.03)]}
    assert as_picture(make_rows(rounds, 10), "t").count("<rect") == 2


def test_peer_answers_and_sleeps_in_between(tmp_path: Path) -> None:
    process = start(tmp_path, FAKE.replace("SECONDS", "0.5"))
    try:
        assert process.measure(WORK) == MeasuredRound(0.5, 0.25, (7, 7))
        stat = Path(f"/proc/{process.version}/stat")
        deadline = time.monotonic() + 20
        while stat.read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < deadline:
            pass
        assert stat.read_text().rpartition(")")[2].split()[0] == "T"
    finally:
        process.close()


def test_exited_peer_is_reported_with_its_last_output(tmp_path: Path) -> None:
    process = start(tmp_path, FAKE)
    try:
        with pytest.raises(PeerEngineFailed, match=r"ended.*out of luck"):
            process.measure(RoundWork(3, 8, 4, 1, 100))
    finally:
        process.close()


def test_silent_peer_times_out(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; print('{\"version\": 1}', flush=True); time.sleep(60)")
    try:
        with pytest.raises(PeerEngineFailed, match="no answer within 0 s"):
            process.measure(WORK, limit_s=0.1)
    finally:
        process.close()


def test_missing_peer_is_reported_as_absent(tmp_path: Path) -> None:
    peer = PeerEngine("x", "run_x", "x", SourceForm.CHECKPOINT, (BF16,))
    assert find_python(peer, tmp_path, "ours") is None
    assert find_python(PeerEngine(OURS, "run", None, SourceForm.CHECKPOINT, (BF16,)), tmp_path, "ours") == "ours"


def test_another_checkpoint_is_converted_to_another_file(tmp_path: Path) -> None:
    peer = PeerEngine("x", "run_x", "x", SourceForm.GGUF, (BF16,))
    (tmp_path / "config.json").write_text("{}")
    first = converted_path(peer, BF16, tmp_path, tmp_path)
    assert converted_path(peer, Precision.INT8, tmp_path, tmp_path) != first
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    assert converted_path(peer, BF16, tmp_path, tmp_path) != first


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 100}')
    (folder / "model.safetensors").touch()
    Tokenizer(WordLevel({"word": 0}, unk_token="word")).save(str(folder / "tokenizer.json"))
    return folder


def options(checkpoint: Path, batch: str, picture: Path | None = None) -> PeersOptions:
    return PeersOptions(
        model=str(checkpoint), threads=1, prompt_tokens=8, new_tokens=4, batch=batch, rounds=2, precision="bf16",
        peers_folder=checkpoint.parent / "peers", json=picture is not None, picture=picture,
    )  # fmt: skip


@pytest.fixture
def two_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Baton takes a second for a prompt, the other two; a third is nowhere."""
    names = {OURS: ("1.0", None), "slow": ("2.0", None), "nowhere": ("1.0", "nowhere")}
    monkeypatch.setattr(
        peers,
        "PEERS",
        [PeerEngine(name, "", folder, SourceForm.CHECKPOINT, (BF16,)) for name, (_, folder) in names.items()],
    )

    def start_fake(peer: PeerEngine, *_: object) -> PeerProcess:
        return start(tmp_path, FAKE.replace("SECONDS", names[peer.name][0]))

    monkeypatch.setattr(peers, "start_peer", start_fake)


@pytest.mark.usefixtures("two_engines")
def test_contest_is_written_as_json_and_picture(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "p.svg"
    assert run_peers_bench(options(checkpoint, "1,2", picture)) == 0
    report = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["state"] for each in report["engines"]} == {
        OURS: "measured",
        "slow": "measured",
        "nowhere": "absent",
    }
    slow = [row for row in report["rows"] if row["name"] == "slow"]
    assert [row["decode_ratio"]["middle"] for row in slow] == pytest.approx([2.0, 2.0])
    by_batch = [each["bf16"] for each in report["rounds"]]
    assert [sorted(each) for each in by_batch] == [["1", "2"], ["1", "2"]]
    assert by_batch[0]["1"]["slow"]["prefill_s"] == 2.0
    assert by_batch[1]["2"]["fastest"] == {"prefill_ratio": 2.0, "decode_ratio": 2.0}
    assert (report["verdict"]["held"], report["verdict"]["missed"]) == (2, 0)
    assert "<svg" in picture.read_text()


@pytest.mark.usefixtures("two_engines")
def test_baton_itself_may_not_fail(checkpoint: Path) -> None:
    with pytest.raises(CommandFailed, match=r"Baton bf16.*out of luck"):
        run_peers_bench(options(checkpoint, "3"))


def test_failed_conversion_is_reported(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PeerEngine("x", "run_x", "x", SourceForm.GGUF, (BF16,))
    failing = [sys.executable, "-c", "import sys; sys.exit('no such family')"]
    monkeypatch.setattr(peers_start, "conversion_command", lambda *_: failing)
    room = peers_start.Room(checkpoint, tmp_path, tmp_path, 1, 1, 8)
    with pytest.raises(PeerEngineFailed, match="converter failed: no such family"):
        peers_start.start_peer(peer, BF16, sys.executable, room, print)
