"""Features of grey images that no data taught: histograms of their gradients' directions, and brightness.

features.name = "gradients.py:extract"; after Dalal and Triggs, "Histograms of oriented gradients" (2005).
"""

import numpy as np
import torch
from torch.nn.functional import avg_pool2d


def extract(x: np.ndarray, cell: int = 4, bins: int = 8) -> torch.Tensor:
    """Per cell of so many pixels to a side: how much of each direction, against the cells around, and how bright."""
    grey = torch.as_tensor(x, dtype=torch.float32).mean(1)
    padded = torch.nn.functional.pad(grey[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    across, down = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2], padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    size, angle = torch.hypot(across, down), torch.atan2(down, across) / (2 * torch.pi) * 2 * bins
    place = torch.arange(bins)[:, None, None]
    apart = (angle[:, None] % bins - place).abs()  # a direction and its opposite count as one
    share = (1 - torch.minimum(apart, bins - apart)).clamp(min=0) * size[:, None]
    histograms = avg_pool2d(share, cell)
    energy = avg_pool2d(histograms.square().sum(1, keepdim=True), 3, 1, 1, count_include_pad=False)
    return torch.cat([(histograms / (energy + 1e-3).sqrt()).flatten(1), avg_pool2d(grey[:, None], cell).flatten(1)], 1)
