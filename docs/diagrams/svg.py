"""A drawing of boxes, lines and text, which follows the reader's choice of a light or dark page."""

from html import escape

# The colours of text and lines; docs/_static/diagrams.css puts those of the page in their place.
STYLE = """
svg.diagram { --ink: #1f2328; --muted: #59636e; --line: #818b98; --box: #f6f8fa; --page: #fff; }
@media (prefers-color-scheme: dark) {
  svg.diagram { --ink: #f0f6fc; --muted: #9198a1; --line: #656c76; --box: #212830; --page: #0d1117; }
}
svg.diagram text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg.diagram text.muted { fill: var(--muted); }
svg.diagram text.title { font-weight: 600; }
svg.diagram text.name { font: 11px ui-monospace, monospace; }
svg.diagram rect { fill: var(--box); stroke: var(--line); }
svg.diagram rect.page { fill: var(--page); stroke: none; }
svg.diagram rect.blue { fill: #2f81f7; fill-opacity: 0.16; stroke: #2f81f7; }
svg.diagram rect.green { fill: #2da44e; fill-opacity: 0.16; stroke: #2da44e; }
svg.diagram rect.red { fill: #d9363e; fill-opacity: 0.16; stroke: #d9363e; }
svg.diagram rect.outline { fill: none; stroke-width: 2; }
svg.diagram path { fill: none; stroke: var(--muted); }
svg.diagram path.faint { stroke: var(--line); stroke-dasharray: 2 4; }
svg.diagram path.red { stroke: #d9363e; }
svg.diagram path.head { fill: var(--muted); stroke: none; }
svg.diagram path.head.red { fill: #d9363e; }
"""
LINE_HEIGHT = 16


class Drawing:
    """Parts of a picture, in the order in which they are drawn; all lengths in pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def text(self, x: float, y: float, *lines: str, kind: str = "", anchor: str = "middle") -> None:
        """Write lines, centred at the height y."""
        top = y + 4.5 - (len(lines) - 1) * LINE_HEIGHT / 2
        for number, line in enumerate(lines):
            place = f'x="{x:g}" y="{top + number * LINE_HEIGHT:g}" text-anchor="{anchor}"'
            self._parts.append(f'<text {place} class="{kind}">{escape(line)}</text>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "", text: str = "") -> None:
        """Draw a box around the point (x, y), with lines in it."""
        place = f'x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="5"'
        if kind and "outline" not in kind:  # the colours let through what is behind them
            self._parts.append(f'<rect {place} class="page"/>')
        self._parts.append(f'<rect {place} class="{kind}"/>')
        self.text(x, y, *lines, kind=text)

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "") -> None:
        """Draw a straight line."""
        self._parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="{kind}"/>')

    def arrow(self, x: float, to_x: float, y: float, *lines: str, kind: str = "") -> None:
        """Draw a horizontal arrow below its lines of text."""
        back = -8 if to_x > x else 8
        self.line(x, y, to_x + back, y, kind)
        self._parts.append(f'<path d="M{to_x:g} {y:g}l{back} -4v8z" class="head {kind}"/>')
        self.text((x + to_x) / 2, y - 4 - len(lines) * LINE_HEIGHT / 2, *lines)

    def svg(self) -> str:
        """Return the picture as a file of its own, which may also stand in a page."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" viewBox="0 0 {self.width} {self.height}"'
        parts = "\n".join(part.replace(' class=""', "") for part in self._parts)
        return f'{head} width="{self.width}">\n<style>{STYLE}</style>\n{parts}\n</svg>\n'
