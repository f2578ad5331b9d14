"""Expert loads to plan for: recorded ones that the user has, and generated ones that look like them.

The generator is fitted to DeepSeek-V3 windows recorded with SGLang (its issue 6017; their licence is not stated, so
they are not in the repository): within a layer the loads vary by 0.73 to 1.07 of the mean, the hottest expert has 5.6
to 8.1 times the mean (13.7 in the worst layer), groups of 32 experts differ by 1.5 to 2.1 times, none is at zero.
A load drifts by a lognormal factor per expert: sigma 0.07 to 0.30 between windows of a phase, 0.47 between phases.
"""

from pathlib import Path

import numpy as np

from expert_placement.files import read_loads

TOKENS = 100e6  # choices per layer and window
GROUPS = 8
GROUP_SIGMA, EXPERT_SIGMA = (0.25, 0.5), (0.5, 0.8)  # of the logarithm, drawn for each layer
HOT_FACTOR = 1.7  # the hottest expert of a layer is up to this much hotter than the rest suggests


def generate(layers: int, experts: int, seed: int) -> np.ndarray:
    """Return a load [layers, experts] float64, the same for the same seed."""
    rng = np.random.default_rng(seed)
    group_sigma = rng.uniform(*GROUP_SIGMA, size=(layers, 1))
    expert_sigma = rng.uniform(*EXPERT_SIGMA, size=(layers, 1))
    logs = np.repeat(rng.normal(size=(layers, GROUPS)) * group_sigma, experts // GROUPS, axis=1)
    load = np.exp(logs + rng.normal(size=(layers, experts)) * expert_sigma)
    hottest = load.argmax(axis=1)
    load[np.arange(layers), hottest] *= rng.uniform(1.0, HOT_FACTOR, size=layers)
    result: np.ndarray = load / load.sum(axis=1, keepdims=True) * TOKENS
    return result


def drift(load: np.ndarray, sigma: float, seed: int) -> np.ndarray:
    """Return the load after a lognormal drift of every expert, with the same total in each layer."""
    moved = load * np.exp(np.random.default_rng(seed).normal(0.0, sigma, size=load.shape))
    result: np.ndarray = moved * (load.sum(axis=1) / moved.sum(axis=1))[:, None]
    return result


def read_windows(paths: list[Path]) -> dict[str, np.ndarray]:
    """Return recorded windows by file name, each [layers, experts]; the last window of a file with several."""
    return {path.stem: read_loads([path]).load[-1] for path in paths}


def phase_pairs(windows: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """Name the pairs of recorded windows of one phase: the part of the name before the first underscore."""
    names = list(windows)
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if a.split("_")[0] == b.split("_")[0]]
