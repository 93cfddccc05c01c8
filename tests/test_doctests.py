import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "reframe_vl"


def modules_with_examples() -> list[str]:
    files = {*PACKAGE.rglob("*.py"), *(PACKAGE / "callbacks").rglob("*.py")}
    return sorted(
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if ">>> " in file.read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings_give_what_they_show(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
