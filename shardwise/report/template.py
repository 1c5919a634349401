"""Templates of the pages: text is escaped, and the one script that a page may run is named by its hash.

A page stands alone: no other files, no requests. Its content security policy forbids all scripts but ``page.js``,
which it contains; JSON in a page is data, which browsers do not run. Texts of a run are escaped by the template engine
and, in JSON, by ``data_block``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def template_text(name: str, package: str = __package__) -> str:
    """A file next to this one, or of another package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


@cache
def script(name: str = "page.js", package: str = __package__) -> str:
    """A script without its comments."""
    return re.sub(r"^\s*//.*\n", "", template_text(name, package), flags=re.MULTILINE)


@cache
def policy(live: bool = False, code: str | None = None) -> str:
    """The content security policy: styles, the one script and, for a live page, requests to its own server.

    Args:
        code: of the script; that of ``page.js`` by default.
    """
    digest = base64.b64encode(hashlib.sha256((code or script()).encode()).digest()).decode()
    own = "; connect-src 'self'" if live else ""
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none';"
        f" script-src 'sha256-{digest}'{own}"
    )


@cache
def _jinja_environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["tight"] = tight
    environment.filters["ticked"] = ticked
    environment.filters["data_block"] = data_block
    return environment


def rendered(
    name: str,
    values: Mapping[str, Any],
    live: bool = False,
    package: str = __package__,
    code: str | None = None,
) -> str:
    """A template with these values and the one script; it may include those next to this file."""
    given = {
        **values,
        "style": Markup(template_text("page.css")),
        "script": Markup(code or script()),
        "policy": Markup(policy(live, code)),
    }
    return without_control(_jinja_environment().from_string(template_text(name, package)).render(given))


def data_block(value: Any) -> Markup:
    """JSON within a ``<script>`` element: it cannot end the element, or hold what cannot be printed."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace("/", "\\u002f"))


def without_control(text: str) -> str:
    """`text` with control characters, direction overrides and lone surrogates replaced by U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", text)


def tight(text: str) -> str:
    """`text` with each number kept on one line with its unit."""
    return re.sub(r"(?<=\d) (?=[%A-Za-z])", "\u00a0", text)


def ticked(text: str) -> Markup:
    """`text` with words in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
