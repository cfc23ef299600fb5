"""The page as a whole: its data as JSON, its code and style inlined, and the limit of its size.

Everything variable reaches the page as JSON in a script element of a type that browsers do not
run, with ``<`` escaped, and the document through ``textContent`` only. The policy in the page's
head lets only its own scripts run, by their hashes, and forbids every request.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from bapo_megatron import __version__
from bapo_megatron.tools.report.figures import metric_curves, panels_of, phases_of, progress_of
from bapo_megatron.tools.report.overview import (
    card_of,
    difference_table,
    evaluation_table,
    seed_table,
)
from bapo_megatron.tools.report.rollouts import find_tokenizer, sample_rollouts
from bapo_megatron.tools.report.runs import events_of, group_runs, read_runs

MAX_BYTES = 20_000_000
"""Limit of the page."""
_MAX_ROLLOUT_BYTES = 12_000_000
_CODE_BYTES = 5_300_000
"""plotly.js and the page's own files, about."""
_MARGIN = 0.92
"""Share of the room that rollouts may take, since their size is estimated."""
_SCRIPTS = ("figures.js", "reader.js", "page.js")


def page_data(paths: Sequence[Path], tokenizer: Path | None = None) -> dict[str, Any]:
    """Read runs, at least one, and return what the page shows, as JSON values.

    ``tokenizer`` is the directory of the tokenizer for all runs; default: each run's own.

    Raises:
        ValueError: A directory holds no readable run, or a file of it is damaged.
        OSError: A file cannot be read.
    """
    runs = read_runs(paths)
    groups, differing = group_runs(runs)
    data: dict[str, Any] = {
        "groups": [
            {"label": group.label, "runs": [runs.index(run) for run in group.runs]}
            for group in groups
        ],
        "cards": [card_of(group) for group in groups],
        "runs": [
            {
                "name": run.name,
                "events": list(map(asdict, events_of(run))),
                "progress": progress_of(run),
            }
            for run in runs
        ],
        "differences": difference_table(groups, differing),
        "seeds": seed_table(groups),
        "evaluations": evaluation_table(runs),
        "panels": panels_of(groups),
        "metrics": metric_curves(groups),
        "phases": [phases_of(run) for run in runs],
    }
    room = _MARGIN * (MAX_BYTES - _CODE_BYTES - len(as_json(data)))
    room = min(_MAX_ROLLOUT_BYTES, max(0.0, room)) / len(runs)
    data["rollouts"] = [sample_rollouts(run, find_tokenizer(run, tokenizer), room) for run in runs]
    return data


def render(data: dict[str, Any]) -> str:
    """Return the page for ``page_data``.

    Raises:
        ValueError: It would be larger than ``MAX_BYTES``.
    """
    import jinja2
    from plotly.offline import get_plotlyjs  # a second

    folder = files("bapo_megatron.tools.report")
    code = [get_plotlyjs(), *((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    digests = [hashlib.sha256(script.encode()).digest() for script in code]
    page = environment.from_string((folder / "page.html").read_text(encoding="utf-8")).render(
        title=", ".join(group["label"] for group in data["groups"]),
        version=__version__,
        style=(folder / "page.css").read_text(encoding="utf-8"),
        scripts=code,
        hashes=" ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests),
        data=as_json(data),
    )
    size = len(page.encode())
    if size > MAX_BYTES:
        raise ValueError(
            f"report: a page must have at most {MAX_BYTES / 1e6:.0f} MB, this one would have "
            f"{size / 1e6:.1f}; give fewer runs than {len(data['runs'])} at a time"
        )
    return page


def as_json(data: Any) -> str:
    """JSON that no HTML parser takes for markup."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    # Lone surrogates are in no UTF-8 file.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
