"""Imports reasoning-gym without the SyntaxWarnings of cellpylib, which it needs.

Python tells them whenever it compiles that package: in each process, where its folder can't be written to.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*cellpylib")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

__all__ = ["DATASETS", "reasoning_gym"]
