"""What a rank does while its messages travel: the one seam by which work is laid beside dispatch and combine.

Whoever calls `dispatch` or `combine` may give a function of its own. It is called exactly once by a call whose arguments
are good on this rank, when all that can leave has left and before a peer is waited for; where nothing travels it is
called too. (NCCL's sizes are waited for before its rows leave, and a first call of a size may meet to make room.)
It does local work, makes no call of the same dispatcher, and does not raise.

Idea: DeepEP's receive hooks, by which a caller works between sending and receiving. Rejected: those hooks themselves,
as a call that is begun and not yet finished; a caller could leave one open, or begin another.
"""

from collections.abc import Callable

Meanwhile = Callable[[], None]


def nothing() -> None:
    """Do nothing."""
