"""Timelines, drawn: as text for a terminal, as SVG, as a page of HTML."""
