"""Small problems on a shared machine: one arithmetic thread is faster than two that wait for each other."""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
