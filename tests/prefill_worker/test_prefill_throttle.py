"""Chunks and rests of a prefill worker that shares its GPU with decode workers."""

from baton.engine.runner.sharing import MAX_REST_S, DeviceShare, PrefillThrottle


class World:
    """A clock that steps and rests move on, and an engine."""

    def __init__(self, step_s: float) -> None:
        self.chunk_tokens, self.time, self.rests = 512, 0.0, list[float]()
        self._step_s = step_s
        self.throttle = PrefillThrottle(DeviceShare(512, 1.5), lambda: self.time, self.rest)

    def step(self) -> None:
        self.throttle.rest()
        self.time += self._step_s
        self.chunk_tokens = self.throttle.observe(self._step_s)

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.time += seconds


def test_throttle_does_not_rest_without_a_slow_down() -> None:
    world = World(0.01)
    for _ in range(3):
        world.step()
    assert (world.rests, world.chunk_tokens) == ([], 512)


def test_slow_decode_makes_chunks_smaller_and_then_rests_before_the_next() -> None:
    world = World(0.01)
    for _ in range(3):
        world.throttle.observe_slow_down(3.0)
        world.step()
    assert world.chunk_tokens == 256
    world.step()
    assert [round(rest, 6) for rest in world.rests] == [0.0025, 0.005]


def test_rest_is_bounded() -> None:
    world = World(1.0)
    for _ in range(9):
        world.throttle.observe_slow_down(9.0)
        world.step()
    assert max(world.rests) == MAX_REST_S


def test_time_that_passed_anyway_counts_as_rest() -> None:
    world = World(0.01)
    for _ in range(3):
        world.throttle.observe_slow_down(3.0)
        world.step()
    rests = len(world.rests)
    world.time += 1.0
    world.step()
    assert len(world.rests) == rests
