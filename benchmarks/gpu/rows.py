"""What the parts of a day with a GPU hand over: rows of named figures, as JSON values. No torch in here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Figure = float | int | str | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a part's table."""

    name: str
    figures: Mapping[str, Figure]
    note: str = ""
    is_right: bool = True  # False: an answer is wrong, or what was asked for did not run
    goals: Mapping[str, float] = field(default_factory=dict)  # what figures should at least be, by name

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def missed(self) -> list[str]:
        """Return the names of the figures that are under their goal."""
        return [
            name
            for name, goal in self.goals.items()
            if isinstance(value := self.figures.get(name), float | int) and value < goal
        ]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every unit of a day is told."""

    device: str  # "cuda", or "interpreter": Triton's, on CPU tensors, whose times mean nothing
    is_tiny: bool  # shapes that the interpreter can afford
    known: Mapping[str, float] = field(default_factory=dict)  # figures so far, by "part/unit/row/figure"

    @property
    def is_interpreted(self) -> bool:
        """Whether there is no GPU behind this day."""
        return self.device == "interpreter"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def ceiling(self, name: str) -> float | None:
        """Return what the day measured as a ceiling; None where it did not."""
        keys = [key for key in self.known if key.startswith("ceilings/") and key.endswith(f"/{name}")]
        return self.known[keys[-1]] if keys else None
