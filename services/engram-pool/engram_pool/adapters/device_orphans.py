"""Folders for versions that lie on a device and have none here: the folder was lost, or another host loaded them.

Owns the step from a device's directory back to a version's folder. What lies where on the device is `segment_places`'.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from pathlib import Path

from engram_pool.adapters.segment_places import SegmentPlaces, place_name
from engram_pool.adapters.version_files import COMMIT_MARKER, LOCK_NAME
from treadle.chassis.small_files import FOLDER_MODE, write_small
from treadle.contract import DataLoss, TreadleError
from treadle.contract.version import check_name

log = logging.getLogger("engram_pool.store")


def make_folders(folder: Path, places: SegmentPlaces, loading: str) -> None:
    """One for each orphan below `folder`, by one rename each from a name that begins with `loading`.

    What cannot be adopted is logged and stays on the device.
    """
    known = [path.parent for path in folder.rglob(place_name("*"))]
    for name, version, found in places.orphans(known):
        staged = folder / (loading + secrets.token_hex(8))
        staged.mkdir(FOLDER_MODE)
        try:
            model = places.adopt(staged, found)
            if (model.name, model.version) != (check_name(name), version):
                raise DataLoss(f"the device says {name} {version}, its segment {model.name} {model.version}")
            write_small(staged / LOCK_NAME, b"")
            write_small(staged / COMMIT_MARKER, model.to_json())
            (folder / name).mkdir(FOLDER_MODE, exist_ok=True)
            staged.rename(folder / name / version)
            log.info("version found on the device", extra={"model": name, "version": version})
        except (TreadleError, OSError) as error:
            log.error("version on the device left as it is", extra={"model": name, "version": version, "reason": str(error)})
            shutil.rmtree(staged, ignore_errors=True)
