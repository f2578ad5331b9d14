"""Track how much of a limited resource each owner of an API key holds, so that one key cannot take what others need.

There are two rules. Evictable items (kept responses, kept answers, events, ended batches) are taken from the owner
that holds most: with k owners, an owner that holds less than a k-th loses nothing. Other items (files, background
runs) are refused in time: if there are several keys, an owner may hold at most as much as stays free afterwards. A single
owner thus gets half of the total, and some always stays free for the next owner. That is the dynamic threshold of Choudhury and
Hahne (IEEE/ACM Transactions on Networking 6(2), 1998). Rejected: a fixed part for each key, which is small with many keys and
idle with few active ones.
"""

from collections.abc import Callable


class Shares:
    """The amount that each owner holds of a total. It only counts; the caller evicts or refuses."""

    def __init__(self, total: int, are_several: Callable[[], bool] = lambda: False) -> None:
        """Args: are_several returns whether several owners share the total."""
        self.total, self._are_several = total, are_several
        self._held: dict[str, int] = {}
        self._sum = 0

    @property
    def held(self) -> int:
        """The amount that all owners hold together."""
        return self._sum

    @property
    def is_over(self) -> bool:
        """Whether all owners together hold more than the total."""
        return self._sum > self.total

    @property
    def largest(self) -> str:
        """The owner that holds most. Requires an owner."""
        return max(self._held, key=self._held.__getitem__)

    def held_by(self, owner: str) -> int:
        """Return the amount that an owner holds."""
        return self._held.get(owner, 0)

    def has_room(self, owner: str, amount: int) -> bool:
        """Return whether an owner may take `amount` more."""
        free = self.total - self._sum - amount
        return free >= 0 and (not self._are_several() or self.held_by(owner) + amount <= free)

    def has_part(self, owner: str) -> bool:
        """Return whether an owner holds at most an equal part, so that it may continue regardless of others."""
        return self.held_by(owner) * max(2, len(self._held)) <= self.total

    def take(self, owner: str, amount: int) -> None:
        """Add to an owner's amount."""
        if amount:
            self._held[owner] = self.held_by(owner) + amount
            self._sum += amount

    def give_back(self, owner: str, amount: int) -> None:
        """Subtract from an owner's amount."""
        left = self.held_by(owner) - amount
        assert left >= 0, f"an owner returns {amount} of {left + amount}"
        self._sum -= amount
        if left:
            self._held[owner] = left
        else:
            self._held.pop(owner, None)
