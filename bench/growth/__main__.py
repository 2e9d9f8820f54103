"""`python -m bench.growth [FILE] [FOLDER]`: draw the curves of a JSON file, by default the documents' pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from bench.growth.drawing import draw
from bench.growth.points import CURVES_FILE, read_curves

PICTURES: Final = Path(__file__).parents[2] / "docs" / "pictures"


def main() -> None:
    """Draw each curve."""
    given = [Path(one) for one in sys.argv[1:]]
    file, folder = (*given, *(CURVES_FILE, PICTURES)[len(given) :])
    for curve in read_curves(file).values():
        path = folder / f"scale-{curve.name}.svg"
        path.write_text(draw(curve), "utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
