"""How many tokens a step may have so that it ends in time: learned from how long steps took. Pure.

A step costs about `fixed + per_token * tokens`. Both are fitted by least squares over the recent past, older steps
counting less and less. What the fit says of steps far larger than any of late is not believed: they grow by doubling.
"""

DECAY = 0.98  # weight of a step against the one after it: about the last 50 count
LEAST_TOKENS = 16  # a prompt goes on by this much whatever a step takes, lest it never ends
BELIEVED = 2.0  # times the largest step of late


class StepBudget:
    """Tokens of a step that should take `target_s` seconds, the longest wait between two tokens of an answer."""

    def __init__(self, target_s: float) -> None:
        if target_s <= 0:
            raise ValueError(f"the target is {target_s} s; it must be positive")
        self._target_s = target_s
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._tokens_squared = 0.0
        self._tokens_seconds = 0.0
        self._largest = 0.0  # step of late, in tokens; it fades as the others do

    def observe(self, step_tokens: int, duration_s: float) -> None:
        """A step of so many tokens took so long."""
        self._weight = DECAY * self._weight + 1.0
        self._tokens = DECAY * self._tokens + step_tokens
        self._seconds = DECAY * self._seconds + duration_s
        self._tokens_squared = DECAY * self._tokens_squared + step_tokens * step_tokens
        self._tokens_seconds = DECAY * self._tokens_seconds + step_tokens * duration_s
        self._largest = max(DECAY * self._largest, step_tokens)

    def prefill_tokens(self, decode_tokens: int, most: int) -> int:
        """Prompt tokens, at most `most`, that fit beside `decode_tokens`. At first, and at least, LEAST_TOKENS."""
        least = min(LEAST_TOKENS, most)
        if self._tokens == 0.0:
            return least
        step_tokens = min(self._affordable_tokens(), BELIEVED * self._largest)
        return max(least, min(most, int(step_tokens) - decode_tokens))

    def _affordable_tokens(self) -> float:
        """The step size whose expected duration is the target."""
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens**2
        covariance = self._tokens_seconds / self._weight - mean_tokens * mean_seconds
        # Steps of one size say nothing about the fixed part, and noise may seem to make tokens free.
        if variance > 1e-6 * mean_tokens**2 and covariance > 0.0:
            return mean_tokens + (self._target_s - mean_seconds) * variance / covariance
        return self._target_s / max(mean_seconds, 1e-9) * mean_tokens
