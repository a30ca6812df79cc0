"""A Zarr store that shows what it lacks: a chunk that was not copied is read as NaN, not as the fill value that the store states.

Zarr leaves out chunks that hold nothing but the fill value, so it cannot tell one that is lost from one that is not needed. Of
weather no chunk is all 0.
"""

import json
import re
from typing import Any

from netCDF4 import default_fillvals
from zarr.storage import WrapperStore

METADATA = ("zarr.json", ".zarray", ".zmetadata")


class NaNFillStore(WrapperStore[Any]):
    """A store whose metadata states fill values that mean nothing."""

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """The bytes of a key; of metadata, with other fill values."""
        found = await super().get(key, prototype, byte_range)
        if found is None or key.rpartition("/")[2] not in METADATA:
            return found
        return prototype.buffer.from_bytes(json.dumps(replace_fill_values(json.loads(found.to_bytes()))).encode())


def with_nan_fill(store: Any) -> Any:
    """The same store, in which the fill value of numbers is one that xarray takes for missing."""
    return NaNFillStore(store)


def replace_fill_values(metadata: Any) -> Any:
    """Metadata of any depth (it may hold that of many arrays), with the fill values of arrays replaced."""
    if isinstance(metadata, list):
        return [replace_fill_values(each) for each in metadata]
    if not isinstance(metadata, dict):
        return metadata
    found = {key: replace_fill_values(value) for key, value in metadata.items()}
    kind = re.fullmatch(r"[<>|]?(f|i|u|float|int|uint)(\d+)", str(found.get("dtype", found.get("data_type"))))      # <f4, float32
    if "fill_value" in found and len(found.get("shape", ())) > 1 and kind:
        if kind[1][0] == "f":
            found["fill_value"] = "NaN"
        else:                                        # packed: what its attribute says is missing, else NetCDF's default
            size = int(kind[2]) if "data_type" not in found else int(kind[2]) // 8
            fill = found.get("attributes", {}).get("_FillValue", default_fillvals[f"{kind[1][0]}{size}"])
            if found["zarr_format"] == 3:
                found["fill_value"] = fill
                found["attributes"] = {**found.get("attributes", {}), "_FillValue": fill}
            elif found["fill_value"] is None:        # else xarray takes it for missing already
                found["fill_value"] = fill
    return found
