"""The documentation is built without a warning, and needs no network to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.docs.blocks import ROOT

pytestmark = pytest.mark.slow
FETCHED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["'](?:https?:)?//""")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_the_site_is_built_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    from sphinx.cmd.build import build_main

    status = build_main(["-q", "-n", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(tmp_path)])
    assert status == 0
    for page in tmp_path.rglob("*.html"):
        assert not FETCHED.search(page.read_text(encoding="utf-8")), page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet
    index = (tmp_path / "index.html").read_text()
    assert "Quickstart" in index and (tmp_path / "api.html").read_text().count("hybrid_rl.Trainer.") > 8
