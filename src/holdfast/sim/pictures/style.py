"""The style sheets of the drawings, for light and dark screens and for print."""

from __future__ import annotations

from holdfast.sim.pictures.layout import PAGE_WIDTH

_LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2430",
    "muted": "#596575",
    "faint": "#c9d0d9",
    "grid": "#eef0f3",
    "wash": "#f0f2f5",
    "hatch": "#a9b3bf",
    "red": "#b8232f",
    "amber": "#f3c353",
    "amber-edge": "#8f6400",
    "on-bar": "#ffffff",
    "c0": "#2a64a8",
    "c1": "#0f766b",
    "c2": "#7048a8",
    "c3": "#66701a",
    "n": "#596575",
}

_DARK = {
    "paper": "#12171e",
    "ink": "#e8ecf1",
    "muted": "#a3aebb",
    "faint": "#3d4856",
    "grid": "#1c232c",
    "wash": "#1c232c",
    "hatch": "#566273",
    "red": "#ff8580",
    "amber": "#f3c353",
    "amber-edge": "#f3c353",
    "on-bar": "#0e1319",
    "c0": "#86b6f2",
    "c1": "#5fcabb",
    "c2": "#bfa5f0",
    "c3": "#bccb6c",
    "n": "#a3aebb",
}


def _coloured(palette: dict[str, str]) -> str:
    rules = [
        (".paper", "fill", "paper"),
        (".ink", "fill", "ink"),
        (".muted", "fill", "muted"),
        (".lane", "stroke", "faint"),
        (".axis", "stroke", "muted"),
        (".grid", "stroke", "grid"),
        (".idle", "fill", "wash"),
        (".edge", "stroke", "hatch"),
        (".hatch", "stroke", "hatch"),
        (".red-hatch,.red-edge,.violation-stem", "stroke", "red"),
        (".red-wash,.red-text,.violation-mark", "fill", "red"),
        (".on-bar,.violation-ink", "fill", "on-bar"),
        (".halo", "stroke", "paper"),
        (".stem", "stroke", "muted"),
        (".note-mark,.refused-mark", "fill", "paper"),
        (".note-mark,.refused-mark,.refused-sign", "stroke", "ink"),
        (".accepted-mark,.note-ink,.refused-ink", "fill", "ink"),
        (".accepted-sign", "stroke", "paper"),
        (".accepted-ink", "fill", "paper"),
        (".fault-mark", "fill", "amber"),
        (".fault-mark", "stroke", "amber-edge"),
        *((f".{hue}-fill,.{hue}-text", "fill", hue) for hue in ("c0", "c1", "c2", "c3", "n")),
        *((f".{hue}-line", "stroke", hue) for hue in ("c0", "c1", "c2", "c3", "n")),
    ]
    return "".join(f"{where}{{{what}:{palette[colour]}}}" for where, what, colour in rules)


_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
SVG_STYLE = (
    f"text{{font-family:{_FONT};font-variant-numeric:tabular-nums}}"
    ".title{font-size:24px;font-weight:600}"
    ".verdict{font-size:15px}.name{font-size:16px;font-weight:600}"
    ".kind{font-size:12px}.tick{font-size:11.5px}.label{font-size:12px}.text{font-size:13px}"
    ".number{font-size:11px;font-weight:700}.strong{font-weight:600}"
    ".on-bar.label{font-weight:600}"
    ".halo{paint-order:stroke;stroke-width:4px;stroke-linejoin:round}"
    ".lane{stroke-width:1.5px}.axis{stroke-width:1px;fill:none}.grid{stroke-width:1px}"
    ".hatch{stroke-width:2px}.edge{stroke-width:1px}"
    ".red-hatch{stroke-width:2.5px;opacity:.55}"
    ".red-edge{stroke-width:1.5px;stroke-dasharray:5 3}.red-wash{opacity:.07}"
    ".waits{stroke-width:3px;stroke-dasharray:1 6;stroke-linecap:round}"
    ".arrow{stroke-width:1.5px;fill:none}.lost{stroke-dasharray:5 4}"
    ".cross{stroke-width:2.2px;stroke-linecap:round}.stem{stroke-width:1px}"
    ".note-mark,.refused-mark,.fault-mark{stroke-width:1.5px}"
    ".accepted-sign,.refused-sign{stroke-width:2px;fill:none;stroke-linecap:round}"
    ".fault-ink{fill:#2b1d00}"
    + _coloured(_LIGHT)
    + f"@media screen and (prefers-color-scheme:dark){{{_coloured(_DARK)}}}"
)

PAGE_STYLE = (
    f"body{{margin:0;font:16px/1.55 {_FONT};color:{_LIGHT['ink']};background:{_LIGHT['paper']};"
    "print-color-adjust:exact;-webkit-print-color-adjust:exact}"
    f"main{{max-width:{PAGE_WIDTH}px;margin:0 auto;padding:56px 32px 96px}}"
    "h1{font-size:34px;line-height:1.2;letter-spacing:-.01em;margin:0 0 28px}"
    "h2{font-size:24px;line-height:1.25;margin:0 0 6px}"
    "h1,h2,p,li,td{overflow-wrap:anywhere}"
    "section{margin-top:72px}.verdict{margin:0;max-width:46em;font-size:17px}"
    "figure{margin:0}.wide{overflow-x:auto}.wide svg{display:block}"
    ".captions{list-style:none;margin:16px 0 0;padding:0;font-size:15px}"
    ".captions li{display:grid;grid-template-columns:36px 84px 110px 1fr;gap:0 14px;"
    "align-items:start;padding:3px 0}"
    ".when{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".who,.what.violation{font-weight:600}"
    "details{margin-top:20px;font-size:15px}summary{cursor:pointer}"
    "table{border-collapse:collapse;margin-top:8px}"
    "th,td{text-align:left;vertical-align:top;padding:3px 16px 3px 0}td.when{text-align:right}"
    f".verdict,.when,summary,th{{color:{_LIGHT['muted']}}}.violation{{color:{_LIGHT['red']}}}"
    "@media screen and (prefers-color-scheme:dark){"
    f"body{{color:{_DARK['ink']};background:{_DARK['paper']}}}"
    f".verdict,.when,summary,th{{color:{_DARK['muted']}}}.violation{{color:{_DARK['red']}}}}}"
    "@media (max-width:640px){main{padding:32px 16px 64px}"
    ".captions li{grid-template-columns:36px auto 1fr}.what{grid-column:2/4}}"
    "@media print{main{padding:0;max-width:none}section{break-inside:avoid;margin-top:40px}"
    ".wide{overflow:visible}.wide svg{width:100%;height:auto}details{display:none}}"
)
