"""Sphinx reads the Markdown pages of this folder as they are; `make site` builds them, strictly and without a network."""

from r7convert import __version__

project = "r7convert"
version = release = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns: list[str] = []
nitpicky = True
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"r7convert {__version__}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"source_edit_link": "", "top_of_page_buttons": []}
smartquotes = False  # --help is two hyphens
suppress_warnings = ["toc.not_included"]  # a page that index.md does not list yet is found by links and by search
html_use_index = False
