"""Forms of a status: a page, text for Prometheus, text for a terminal. Names and texts of others are escaped."""

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fednormec.engine.figures import by_importance, figure_of
from fednormec.errors import visible
from fednormec.privacy.labels import up
from fednormec.results.html import card, escape, marked, plain_table
from fednormec.runs.progress import sparkline

Status = dict[str, Any]
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
STYLE, SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("status.css", "status.js"))
SHOWN, PRINTED = 60, 10  # lines of the log on the page, and on a terminal
WIDEST = 60  # characters of a cell on a terminal, at most
NOTHING = "–"
HEADER = ("client", "state", "address", "last seen", "missed rounds", "refused")


def _only(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


HEADERS = (  # nothing is loaded, run or styled but what is on the page, and nobody else's page can hold or read it
    (
        "content-security-policy",
        f"default-src 'none'; script-src {_only(SCRIPT)}; style-src {_only(STYLE)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
)

# in words


def rounds_in_words(status: Status) -> tuple[str, str]:
    """Returns how many rounds are done, and how fast."""
    rounds = status["rounds"]
    pace, silent = rounds["per_second"], rounds["seconds_since_last"]
    fast = None if not pace else f"{pace:.1f} rounds/s" if pace >= 1 else f"{1 / pace:.1f} s a round"
    last = None if silent is None or silent < 5 else f"the last {_ago(silent)}"
    return f"{rounds['done']} of {rounds['of']}", ", ".join(filter(None, (fast, last)))


def privacy_in_words(status: Status) -> tuple[str, str]:
    """Returns the ε that was spent, with its label, and words about it."""
    found = status["privacy"]
    epsilon, whole, left = (found.get(key) for key in ("epsilon", "epsilon_in_all", "epsilon_left"))
    if "delta" not in found:
        return str(found["label"]), str(found["why"])
    spent = "no finite ε" if epsilon is None or not math.isfinite(epsilon) else f"ε {up(epsilon)}"
    rest = None if left is None else f"spent, {math.floor(left * 1000) / 1000:.4g} left of {whole:.4g}"
    words = ", ".join(filter(None, (found["why"], rest, f"δ = {found['delta']:g}", f"{found['trust']} trust")))
    return " ".join(filter(None, (spent, found["label"]))), words


def client_in_words(client: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what a client's line says, by the columns of HEADER."""
    silent = client["silent"]
    where = "here" if client["here"] else "away" if client["address"] else "never came"
    parts = [
        f"{client['refused']} × joining: {client['why_refused']}" if client["refused"] else "",
        f"{client['messages_refused']} × message: {client['why_message_refused']}"
        if client["messages_refused"]
        else "",
    ]
    return (
        client["name"],
        f"{where}, set aside: its memory was lost" if client["set_aside"] else where,
        client["address"] or NOTHING,
        NOTHING if silent is None else _ago(silent),
        f"{client['missed']}" + (f" ({client['missed_in_a_row']} in a row)" if client["missed_in_a_row"] else ""),
        "; ".join(filter(None, parts)) or NOTHING,
    )


def _ago(seconds: float) -> str:
    """Returns how long ago something was, in the largest unit that fits.

    >>> _ago(3.2), _ago(130), _ago(7300)
    ('3 s ago', '2 min ago', '2 h ago')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{int(seconds)} s ago"


def _figure(name: str, value: Any) -> str:
    finite = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:{figure_of(name).form}}" if finite else "not finite"


def _here(status: Status) -> int:
    return sum(client["here"] for client in status["roster"])


# the page


def page(status: Status) -> str:
    """Returns the page of a status, which fetches itself anew every two seconds and needs nothing else."""
    done, fast = rounds_in_words(status)
    spent, about = privacy_in_words(status)
    named = by_importance(status["figures"])
    others = ", ".join(f"{figure_of(name).words} {_figure(name, status['figures'][name])}" for name in named[1:])
    tiles = [
        card("Rounds", done, fast or status["state"]),
        card("Privacy", spent, about, "alarm" if status["privacy"]["label"] else ""),
        card("Clients", f"{_here(status)} of {status['clients']} here", _traffic(status)),
        *(card(_capital(figure_of(name).words), _figure(name, status["figures"][name]), others) for name in named[:1]),
    ]
    share = min(1.0, status["rounds"]["done"] / max(1, status["rounds"]["of"]))
    kinds = [("aside" if one["set_aside"] else "here" if one["here"] else "away") for one in status["roster"]]
    roster = plain_table("roster", HEADER, [client_in_words(one) for one in status["roster"]], kinds)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(f"{done} {status['method']}")}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
<p id="silent" role="alert" hidden></p><main>
<h1>{escape(_capital(status["state"]))}</h1>
<p class="soft">{escape(_subtitle(status))}</p>
<div class="bar"><svg viewBox="0 0 1 1" preserveAspectRatio="none" aria-hidden="true">\
<rect width="{share:.4f}" height="1"/></svg></div>
<dl class="tiles">{"".join(tiles)}</dl>
{_curve(status)}<h2>Clients</h2>{roster}
<h2>Log (UTC)</h2>{_log(status)}
<footer class="soft"><p>{escape(status["folder"])}, process {escape(status["pid"])}. The same as
<a href="/status.json">JSON</a> and <a href="/metrics">for Prometheus</a>.</p>
<p>Who is here, who missed a round and who was refused is not covered by any ε: keep it to yourself.</p></footer>
</main><script>{SCRIPT}</script></body></html>
"""


def _subtitle(status: Status) -> str:
    return (f"{status['method']}, {status['model']}, {status['parameters']:,} parameters. "
            f"As of {status['time'].replace('T', ' ').replace('Z', ' UTC')}.")  # fmt: skip


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _traffic(status: Status) -> str:
    found = status["bytes"]
    return "" if found is None else f"{found['sent'] / 1e6:,.1f} MB sent, {found['received'] / 1e6:,.1f} MB received"


def _log(status: Status) -> str:
    lines = [
        f'<li class="{escape(one["level"])}"><time>{escape(one["time"][:19].replace("T", " "))}</time>'
        f"<b>{escape(one['level'])}</b>{marked(one['message'])}</li>"
        for one in status["log"][: -SHOWN - 1 : -1]
    ]
    return f"<ol>{''.join(lines)}</ol>" if lines else '<p class="soft">Nothing was said yet.</p>'


def _curve(status: Status) -> str:
    """Draws the public figure over the rounds. Its labels are beside the drawing, so that they keep their size."""
    curve = status["curve"]
    if curve is None:
        return '<h2>Curve</h2><p class="soft">There is no public test set, or it was not looked at yet.</p>'
    name, points = curve["figure"], curve["points"]
    title = f"<h2>{escape(_capital(figure_of(name).words))}</h2>"
    if not points:
        return f'{title}<p class="soft">It was never finite.</p>'
    numbers, values = zip(*points, strict=True)
    low, high = bounds(min(values), max(values))
    low, high = (max(0.0, low), min(1.0, high)) if figure_of(name).is_share else (low, high)
    first, wide = numbers[0], (numbers[-1] - numbers[0]) or 1
    places = [((n - first) / wide, 1 - (v - low) / (high - low)) for n, v in points]
    places += [(1.0, places[0][1])] * (len(places) == 1)
    path = " ".join(f"{x * 1000:.1f},{y * 100:.2f}" for x, y in places)
    lines = "".join(f'<line x1="0" x2="1000" y1="{y}" y2="{y}"/>' for y in (0, 50, 100))
    heights = "".join(f"<span>{escape(_figure(name, at))}</span>" for at in (high, (low + high) / 2, low))
    said = f"{figure_of(name).words} from {_figure(name, values[0])} to {_figure(name, values[-1])}"
    return f"""{title}<div class="curve"><div class="heights">{heights}</div>
<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{escape(said)}">{lines}
<polyline points="{path}"/></svg>
<div class="rounds"><span>round {first}</span><span>round {numbers[-1]}</span></div></div>
"""


def bounds(least: float, most: float) -> tuple[float, float]:
    """Returns round numbers below and above two values, not too far from them.

    >>> bounds(0.13, 0.87), bounds(2.0, 2.0)
    ((0.1, 0.9), (1.5, 2.5))
    """
    span = most - least or abs(most) / 2 or 1.0
    step = 10 ** math.floor(math.log10(span))
    step = step / 2 if span < 2.5 * step else step
    low, high = (math.floor(least / step) * step, math.ceil(most / step) * step)
    low, high = (low, high) if high > low else (low - step, high + step)
    return float(f"{low:.12g}"), float(f"{high:.12g}")


# Prometheus


def metrics(status: Status) -> str:
    """Returns the status as Prometheus reads it: what each number is, its type, and the number."""
    return "".join(
        f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
        + "".join(f"{name}{_labels(labels)} {_number(value)}\n" for labels, value in values)
        for name, kind, about, values in _metrics(status)
        if values
    )


Values = list[tuple[dict[str, str], float]]


def _metrics(status: Status) -> Iterator[tuple[str, str, str, Values]]:
    rounds, privacy, traffic = status["rounds"], status["privacy"], status["bytes"] or {}
    about = {key: status[key] for key in ("method", "model", "version")}
    yield "fednormec_info", "gauge", "What is trained; always 1.", [(about, 1)]
    yield "fednormec_rounds_total", "counter", "Rounds that are done.", _one(rounds["done"])
    yield "fednormec_rounds_planned", "gauge", "Rounds that the run has.", _one(rounds["of"])
    yield "fednormec_rounds_per_second", "gauge", "Pace of the last rounds.", _one(rounds["per_second"])
    yield ("fednormec_seconds_since_round", "gauge", "Seconds since the last round ended.",
           _one(rounds["seconds_since_last"]))  # fmt: skip
    yield "fednormec_private", "gauge", "1 if noise protects the clients, 0 if not.", _one(privacy["private"])
    yield "fednormec_epsilon_spent", "gauge", "Privacy spent so far, at delta.", _one(_epsilon(privacy))
    yield "fednormec_epsilon_left", "gauge", "Privacy that is left of the budget.", _one(privacy.get("epsilon_left"))
    yield "fednormec_delta", "gauge", "Delta at which epsilon is stated.", _one(privacy.get("delta"))
    figures = {name: value for name, value in status["figures"].items() if isinstance(value, int | float)}
    yield ("fednormec_figure", "gauge", "Latest figures of the model on the public test set.",
           [({"name": name}, value) for name, value in figures.items()])  # fmt: skip
    yield "fednormec_bytes_sent_total", "counter", "Bytes of requests to clients.", _one(traffic.get("sent"))
    yield "fednormec_bytes_received_total", "counter", "Bytes of answers of clients.", _one(traffic.get("received"))
    yield "fednormec_clients", "gauge", "Clients on the roster.", _one(status["clients"])
    yield "fednormec_clients_here", "gauge", "Clients that are connected.", _one(_here(status))
    for key, kind, words in (
        ("here", "gauge", "1 if the client is connected."),
        ("missed", "gauge", "Rounds since the server was started that the client was asked in and did not answer."),
        ("missed_in_a_row", "gauge", "Rounds in a row in which the client was here and did not answer."),
        ("silent", "gauge", "Seconds since the client was last heard of."),
        ("refused", "gauge", "Times that the client was refused when it joined."),
        ("messages_refused", "gauge", "Messages of the client that were refused."),
        ("set_aside", "gauge", "1 if the client is set aside because its memory was lost."),
    ):
        found = [({"client": one["name"]}, one[key]) for one in status["roster"] if one[key] is not None]
        yield f"fednormec_client_{key}", kind, words, found


def _one(value: float | None) -> Values:
    return [] if value is None else [({}, value)]


def _epsilon(privacy: Mapping[str, Any]) -> float | None:
    """Returns the ε spent; infinity where none is finite, None without privacy."""
    return None if "delta" not in privacy else math.inf if privacy["epsilon"] is None else privacy["epsilon"]


def _labels(labels: Mapping[str, str]) -> str:
    spelled = {name: str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
               for name, value in labels.items()}  # fmt: skip
    return "{" + ",".join(f'{name}="{value}"' for name, value in spelled.items()) + "}" if spelled else ""


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if isinstance(value, int) else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


# a terminal


def text(status: Status) -> str:
    """Returns the status as lines for a terminal."""
    done, fast = rounds_in_words(status)
    spent, about = privacy_in_words(status)
    lines = [
        f"state      {status['state']}",
        f"training   {status['method']}, {status['model']}, {status['parameters']:,} parameters",
        f"rounds     {done}" + (f" ({fast})" if fast else ""),
        f"privacy    {spent} ({about})",
    ]
    for name in by_importance(status["figures"]):
        lines.append(f"{figure_of(name).short:<10} {_figure(name, status['figures'][name])}")
    if status["curve"] is not None:
        lines.append(f"curve      {sparkline([value for _, value in status['curve']['points']])}")
    lines.append(f"clients    {_here(status)} of {status['clients']} here" if status["roster"] else
                 f"clients    {status['clients']}")  # fmt: skip
    if status["roster"]:
        lines += ["", *_table([HEADER, *(client_in_words(one) for one in status["roster"])])]
    if status["log"]:
        lines += ["", *(f"{one['time']} {one['level']} {one['message']}" for one in status["log"][-PRINTED:])]
    return "\n".join(map(visible, lines))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    shown = [[visible(cell, WIDEST) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
