"""The manifest of sharded state: merged from all ranks' parts, checked, encoded and decoded."""

from collections.abc import Mapping
from pathlib import Path

from tests.scale import Curve
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint import writer
from toolkit.checkpoint.manifest import TensorPart, TensorRecord

TENSORS, COLUMNS = 20, 4


def put_together(ranks: int) -> Mapping[str, float]:
    """Merge tensors cut along both dimensions, where many parts share a row or a column."""
    written = [_written(rank, ranks // COLUMNS) for rank in range(ranks)]
    manifest = writer._merge(1, ranks, {}, written)
    raw = manifest.encode()
    parts = sum(len(record.parts) for record in manifests.decode(raw, Path("manifest.json")).tensors.values())
    return {"parts": parts, "MB": round(len(raw) / 1e6, 1)}


def _written(rank: int, rows: int) -> writer._WrittenPart:
    row, column = divmod(rank, COLUMNS)
    name, records = manifests.file_name(rank), {}
    for number in range(TENSORS):
        # every other tensor lies the other way round
        offsets, shape = ((row, column), (rows, COLUMNS)) if number % 2 else ((column, row), (COLUMNS, rows))
        part = TensorPart(name, 4 * number, 4, offsets, (1, 1), 0)
        records[f"layer{number}.weight"] = TensorRecord("sharded", "float32", shape, (part,))
    return writer._WrittenPart({name: 4 * TENSORS}, records, {})


CURVES = [Curve("manifest of 20 tensors", "ranks", (64, 1024, 8192), put_together)]
