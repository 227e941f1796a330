"""`rollout init`: a folder to begin in. Its files lie in `workers/template/`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pipeline.errors import ConfigError

FILES = {"config.yaml": "config.yaml", "sums.py": "sums.py.txt", "tasks.jsonl": "tasks.jsonl"}
"""File in the new folder -> its template. The handler's name ends in .txt so that no tool takes it for code of ours."""

HANDLER = "sums:Sums"


def write(folder: Path, *, force: bool = False) -> list[Path]:
    """Write the files; returns them. Raises ConfigError for a folder that is not empty (unless `force`)."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError(
            f"{folder} is not empty: choose another folder, or say --force to write {', '.join(FILES)} into it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / name, source) for name, source in FILES.items()]
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror}") from None


def _write(target: Path, source: str) -> Path:
    target.write_text((files("workers") / "template" / source).read_text("utf-8"), encoding="utf-8")
    return target
