"""Writes sbatch/*.sbatch: the batch scripts for the default settings. `make docs`. A test compares them."""

from pathlib import Path

from workers.slurm.text import pages

if __name__ == "__main__":
    folder = Path(__file__).parent.parent / "sbatch"
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
