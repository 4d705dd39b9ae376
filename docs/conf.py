"""How ``make docs`` makes the site: Sphinx, MyST for Markdown, furo; the reference comes from generated.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from generated import readable, written_by_code  # noqa: E402

from paceline import __version__  # noqa: E402

project = "paceline"
author = "the paceline authors"
copyright = "the paceline authors, Apache-2.0"  # noqa: A001 (Sphinx calls it so)
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["img"]
nitpicky = False  # type names of private modules have no page
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = f"paceline {__version__}"
html_favicon = "../src/paceline/server/static/icon.svg"
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False


def setup(app: object) -> None:
    """Pages whose text the code itself says, and docstrings as reStructuredText."""
    app.connect("source-read", written_by_code)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", readable)  # type: ignore[attr-defined]
