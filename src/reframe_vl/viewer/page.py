"""Puts the page together: its own files and the packed rollouts, in one HTML text."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files

from reframe_vl.viewer.export import Export

SCRIPTS = (
    *("data", "text", "colors", "filters", "list", "looked", "conversation"),
    *("facts", "compare", "main"),
)
"""In the order in which they are run, in one scope."""


def build_page(title: str, data: Export) -> str:
    """The whole page.

    Its policy lets it run its own script and nothing else, and load nothing from anywhere; what a
    model wrote is in it as base64 alone.
    """
    style = _own("page.css")
    script = "\n".join(_own(f"{name}.js") for name in SCRIPTS)
    blocks = [
        f'<script type="text/plain" id="{name}-{number}">{text}</script>'
        for name, texts in (
            ("index", [data.index]),
            ("details", data.details),
            ("images", data.images),
        )
        for number, text in enumerate(texts)
    ]
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_digest(script)}'; "
        f"style-src '{_digest(style)}'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": style,
        "data": "\n".join(blocks),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _own("page.html"))


def _own(name: str) -> str:
    text = files("reframe_vl.viewer").joinpath("page", name).read_text(encoding="utf-8")
    return text.strip() + "\n"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
