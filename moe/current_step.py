"""Which step a model runs now: one object for all its layers and weights, so that it changes in one place.

There is one step, refilled before every forward.
"""

from dataclasses import dataclass

from kvcache.step import Step


@dataclass
class CurrentStep:
    """The step that organs and weights look at; written between their calls only."""

    step: Step
