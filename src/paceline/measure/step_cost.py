"""StepCost: what a step of so many tokens costs, learnt from the steps that ran."""

from __future__ import annotations

from bisect import insort

_FORGET = 0.9  # weight of what a size cost before, when a step of that size is measured
_NUM_SIZES = 24  # powers of two
_STALLED = 1.5  # fewer tokens do not cost so many times as much


class StepCost:
    """The mean cost of steps by their number of tokens, one mean a power of two.

    It answers "what would this step have cost without the others", which is how time in shared
    steps is divided. Contexts grow and machines slow down, so old measurements fade.
    """

    def __init__(self) -> None:
        self._tokens = [0.0] * _NUM_SIZES  # mean of the sizes that fell into a class; 0: none yet
        self._cost = [0.0] * _NUM_SIZES
        self._known: list[int] = []  # classes with a mean, in order

    def observe(self, num_tokens: int, cost: float) -> None:
        size = min((num_tokens - 1).bit_length(), _NUM_SIZES - 1)
        if self._known and self._known[0] < size:
            self._forget_stalls(size, cost)
        if not self._tokens[size]:
            self._tokens[size], self._cost[size] = num_tokens, cost
            insort(self._known, size)
            return
        self._tokens[size] += (num_tokens - self._tokens[size]) * (1 - _FORGET)
        self._cost[size] += (cost - self._cost[size]) * (1 - _FORGET)

    def _forget_stalls(self, size: int, cost: float) -> None:
        """Forget the smaller sizes that were dearer: the first step of all finds nothing warm."""
        for small in [s for s in self._known if s < size and self._cost[s] > _STALLED * cost]:
            self._known.remove(small)
            self._tokens[small] = 0.0

    def cost(self, num_tokens: int) -> float:
        """Return the expected cost of a step; on the line through the two nearest known sizes.

        With one known size, or none, cost is proportional to tokens.
        """
        known, tokens, costs = self._known, self._tokens, self._cost
        if not known:
            return float(num_tokens)
        below = above = known[0]
        for size in known[1:]:
            below, above = above, size
            if tokens[size] >= num_tokens:
                break
        if below == above:
            return costs[above] / tokens[above] * num_tokens
        t0, c0, t1, c1 = tokens[below], costs[below], tokens[above], costs[above]
        return c0 + (c1 - c0) * (num_tokens - t0) / (t1 - t0)

    def share(self, num_tokens: int, total: int) -> float:
        """Return the part of a step of `total` tokens that `num_tokens` would have cost alone.

        Never less than their share of the tokens: what all share is charged to everybody.
        """
        if num_tokens >= total:
            return 1.0
        whole = self.cost(total)
        alone = self.cost(num_tokens) / whole if whole > 0 else 0.0
        return min(max(alone, num_tokens / total), 1.0)
