"""How much of something bounded each owner of an API key holds, so that one key cannot take what the others need.

There are two rules. What can be forgotten (kept responses, kept answers, events, ended batches) is taken from the owner that
holds most: with k owners, none loses anything while it holds less than a k-th. What cannot be forgotten (files, background
runs) is refused in time: where several keys are known, an owner may hold as much as is left free after it, which is half of
the total for one alone, and leaves something for every further one. That is the dynamic threshold of Choudhury and Hahne
(IEEE/ACM Transactions on Networking 6(2), 1998). Rejected: a fixed part for each key, which is small with many keys and
idle with few active ones.
"""

from collections.abc import Callable


class Shares:
    """What each owner holds of a total. It is told; it moves nothing itself."""

    def __init__(self, total: int, are_several: Callable[[], bool] = lambda: False) -> None:
        """Args: are_several says whether there is more than one owner to share with."""
        self.total, self._are_several = total, are_several
        self._held: dict[str, int] = {}
        self._sum = 0

    @property
    def held(self) -> int:
        """What all hold together."""
        return self._sum

    @property
    def is_over(self) -> bool:
        """Whether all together hold more than the total."""
        return self._sum > self.total

    @property
    def largest(self) -> str:
        """The owner that holds most; there must be one."""
        return max(self._held, key=self._held.__getitem__)

    def held_by(self, owner: str) -> int:
        """What an owner holds."""
        return self._held.get(owner, 0)

    def has_room(self, owner: str, amount: int) -> bool:
        """Whether an owner may take so much more."""
        free = self.total - self._sum - amount
        return free >= 0 and (not self._are_several() or self.held_by(owner) + amount <= free)

    def has_part(self, owner: str) -> bool:
        """Whether an owner holds no more than an equal part: it may go on with what it has begun, whatever others hold."""
        return self.held_by(owner) * max(2, len(self._held)) <= self.total

    def take(self, owner: str, amount: int) -> None:
        """Note that an owner holds more."""
        if amount:
            self._held[owner] = self.held_by(owner) + amount
            self._sum += amount

    def give_back(self, owner: str, amount: int) -> None:
        """Note that an owner holds less."""
        left = self.held_by(owner) - amount
        assert left >= 0, f"an owner gives back {amount} of {left + amount}"
        self._sum -= amount
        if left:
            self._held[owner] = left
        else:
            self._held.pop(owner, None)
