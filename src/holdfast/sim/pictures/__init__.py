"""Draws timelines as text for a terminal, as SVG, and as an HTML page."""
