"""Results as pages, pictures and Markdown."""

from kvkeep.reports.charts import Axis, Chart, Level, Line, Point
from kvkeep.reports.headlines import bench_headline, eval_headline
from kvkeep.reports.origin import Origin
from kvkeep.reports.page import bench_page, eval_page
from kvkeep.reports.picture import (
    Picture,
    bench_picture,
    eval_picture,
    require_drawable,
    save_picture,
)
from kvkeep.reports.svg import figure, standalone
from kvkeep.reports.texts import eval_markdown

__all__ = [
    "Axis",
    "Chart",
    "Level",
    "Line",
    "Origin",
    "Picture",
    "Point",
    "bench_headline",
    "bench_page",
    "bench_picture",
    "eval_headline",
    "eval_markdown",
    "eval_page",
    "eval_picture",
    "figure",
    "require_drawable",
    "save_picture",
    "standalone",
]
