"""What `rollout doctor` says of sandboxes: settings that can't work are told, whatever this user may look at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import Config
from tests.boxes import PROGRAMS, short_root
from tests.services import require
from workers.doctor import Finding
from workers.doctor.sandbox import findings
from workers.sandbox.boxes import overlay

__all__ = ["short_root"]

NOBODY = 65534


async def look(**settings: str) -> dict[str, Finding]:
    """Name -> finding; a sandbox's driver says one more than that it isolates nothing."""
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    return {item.name: item for item in await findings(Config().changed(changes))}


@pytest.fixture
def shut(short_root: Path) -> Iterator[Path]:
    """A folder that this user may not enter."""
    folder = short_root / "shut"
    folder.mkdir(mode=0)
    was = os.geteuid()
    short_root.chmod(0o755)
    if was == 0:
        os.seteuid(NOBODY)
    yield folder
    os.seteuid(was)
    folder.chmod(0o700)


async def test_folders_that_may_not_be_looked_at(shut: Path) -> None:
    from workers.doctor.sandbox import _room

    for setting in ("images.cache", "sandbox.root"):
        found = _room("disk", shut / "deep" / "er", setting)
        assert (found.grade, found.mend) == ("fail", f"set {setting} to another folder")
        assert setting in found.text and str(shut) in found.text


async def test_roots_that_can_not_be_used(short_root: Path) -> None:
    require("bwrap")
    (short_root / "file").touch()
    found = await look(sandbox__driver="bubblewrap", sandbox__root=str(short_root / "file"))
    assert found["sandbox disk"].grade == "fail" and "it is no folder" in found["sandbox disk"].text


@pytest.mark.parametrize(
    ("image", "grade", "said"),
    [
        ("nothere", "fail", "there is no image 'nothere'"),
        ("./no.sif", "fail", "there is no image at"),
        ("debian", "ok", "debian may be large"),
        ("docker://example.invalid/x", "ok", "may be large"),
    ],
)
async def test_an_image_is_looked_for_and_not_built(short_root: Path, image: str, grade: str, said: str) -> None:
    for program in PROGRAMS["apptainer"]:
        require(program)
    found = await look(sandbox__driver="apptainer", sandbox__image=image, images__cache=str(short_root / "cache"))
    assert found["sandbox"].grade == grade and said in found["sandbox"].text
    assert not list((short_root / "cache").glob("images/*"))


async def test_local_tells_of_the_other_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bubblewrap", "apptainer"):
        for program in PROGRAMS[name]:
            require(program)
    told = (await look())["other drivers"]
    assert told.grade == "ok" and told.text.startswith("bubblewrap works; apptainer works")
    monkeypatch.setattr("workers.sandbox.boxes.bubblewrap.shutil.which", lambda *_, **__: None)
    told = (await look())["other drivers"]
    assert told.grade == "warn" and "bwrap is not installed" in told.text and "apptainer is not" in told.text


async def test_folders_that_can_not_be_made_again_are_told(short_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in PROGRAMS["apptainer"]:
        require(program)
    settings = {"sandbox__driver": "apptainer", "images__cache": str(short_root), "sandbox__root": str(short_root)}
    told = (await look(**settings))["sandbox"]
    assert told.grade == "ok", told
    monkeypatch.setattr(overlay, "_LAUNCH", f'echo "{overlay.REFUSED}" >&2; exit 1')
    told = (await look(**settings))["sandbox"]
    assert told.grade == "warn" and "made again" in told.text and "Input/output error" in told.text
    assert [path.name for path in short_root.iterdir() if path.name.startswith(".doctor")] == []
