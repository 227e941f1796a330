"""Drivers: ways to make boxes on this machine. `make_driver` makes the one that the configuration names."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Config
from pipeline.errors import ConfigError
from workers.sandbox.box import Driver


def make_driver(config: Config, root: Path) -> Driver:
    """The driver that `sandbox.driver` names. `root`: this host process's own folder, made 0700 if it is missing.

    Raises SandboxError for a root that others may write to.
    """
    root = root.expanduser().absolute()
    if config.sandbox.driver == "local":
        from workers.sandbox.boxes.local import Local

        return Local(config, root)
    if config.sandbox.driver == "bubblewrap":
        from workers.sandbox.boxes.bubblewrap import Bubblewrap

        return Bubblewrap(config, root)
    if config.sandbox.driver == "apptainer":
        from workers.sandbox.boxes.apptainer import Apptainer

        return Apptainer(config, root)
    raise ConfigError(f"sandbox.driver is {config.sandbox.driver!r}, there are: local, bubblewrap, apptainer")
