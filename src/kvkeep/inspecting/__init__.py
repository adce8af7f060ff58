"""What an eviction keeps of one prompt, to look at: a page, a picture."""

from kvkeep.inspecting.inspection import InspectedLayer, Inspection, Rung
from kvkeep.inspecting.layers import parse_layers
from kvkeep.inspecting.looking import BUDGETS, inspect_prompt
from kvkeep.inspecting.page import render_html, save_html
from kvkeep.inspecting.picture import save_png
from kvkeep.inspecting.units import TextUnit, text_units

__all__ = [
    "BUDGETS",
    "InspectedLayer",
    "Inspection",
    "Rung",
    "TextUnit",
    "inspect_prompt",
    "parse_layers",
    "render_html",
    "save_html",
    "save_png",
    "text_units",
]
