"""What a run costs, learned from the runs themselves; the warm-up gives the first value. Loop thread only.

Runs are classed by model and by the power of two of the request's size, since the cost of a dynamic shape follows its
size. A class that was never seen has no estimate: its first run goes to the compute thread, where a surprise blocks
nobody.
"""

from __future__ import annotations

# A run can be disturbed, which only makes it longer: the estimate follows shorter runs fast and longer ones slowly.
DOWN, UP = 0.5, 0.05
# Below this many hand-offs a run delays the loop less than the loop would spend on passing it back and forth.
INLINE_HAND_OFFS = 4.0
# A run that much above the limit shows a cost that depends on the data (a Loop's count): its class keeps to the thread
# for a while, whatever the estimate says.
SURPRISE, CAUTIOUS = 10.0, 1000


class Costs:
    """Estimated seconds for each (model, size class), and the limit under which a run stays on the loop."""

    __slots__ = ("_seconds", "_surprises", "_suspects", "inline_below")

    def __init__(self) -> None:
        self._surprises: dict[tuple[str, int], int] = {}
        self._suspects: set[tuple[str, int]] = set()
        self._seconds: dict[tuple[str, int], float] = {}
        self.inline_below = 0.0

    def set_hand_off(self, seconds: float) -> None:
        """`seconds`: measured time of one empty round trip through the compute thread."""
        self.inline_below = seconds * INLINE_HAND_OFFS

    def cheap(self, model: str, size: int) -> bool:
        """True when the run is known to be cheaper on the loop than in the thread."""
        key = (model, size.bit_length())
        if self._surprises and key in self._surprises:
            self._surprises[key] -= 1
            if self._surprises[key] <= 0:
                del self._surprises[key]
            return False
        estimate = self._seconds.get(key)
        return estimate is not None and estimate <= self.inline_below

    def learn(self, model: str, size: int, seconds: float) -> None:
        key = (model, size.bit_length())
        known = self._seconds.get(key)
        if seconds <= self.inline_below:
            self._suspects.discard(key)
        elif seconds > SURPRISE * self.inline_below and known is not None and known <= self.inline_below:
            # once may be the kernel, which ran somebody else meanwhile; twice is the model
            if key in self._suspects:
                self._surprises[key] = CAUTIOUS
            self._suspects.add(key)
        if known is None:
            self._seconds[key] = seconds
        else:
            self._seconds[key] = known + (DOWN if seconds < known else UP) * (seconds - known)
