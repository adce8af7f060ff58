"""kvkeep beside its peers: same weights, prompts, budgets and scorer, each in its own process.

    python benchmarks/peers/peers.py [--prompts N] [--kvpress PYTHON] [--velox PYTHON] ...

`make peers` makes the peers' environments first. The folder (build/peers) keeps the prompts, each
side's answers and the times; what is in it is not computed again, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from peer_answers import read, read_prompts, read_rows, read_timings, write, write_prompts
from peer_judging import judged, own_answers
from peer_plan import BUDGETS, LENGTH, OWN, PAIRS, RECOMMENDED, SEED, TASKS, VELOX
from peer_report import Report, markdown

HERE = Path(__file__).parent
BUDGET = "25%"  # of the times
SPREAD = ("snapkv", "adakv-snapkv", RECOMMENDED.name)  # timed at every budget


def main(arguments: list[str] | None = None) -> int:
    """Draw prompts, ask all sides, take times, write the report."""
    options = parse(arguments)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = demo_model()
    if not options.report_only:
        draw(options, model)
    sides = commands(options, model)
    failed: dict[str, str] = {}
    if not options.report_only:
        failed |= run(sides["answers"], options.together, folder)
        if options.kvpress is not None and not (folder / "kvpress-rows.npz").exists():
            failed |= run(sides["rows"], options.together, folder)
        if not options.no_timings:
            failed |= run(sides["timings"], False, folder)
    text = markdown(gathered(options, failed))
    write(options.report, text)
    print(text)
    return 0


def demo_model() -> Path:
    """The demo model's folder in float32, fetched if need be."""
    from kvkeep.demo_model import resolve_model

    return Path(resolve_model("demo"))


def draw(options: argparse.Namespace, model: Path) -> None:
    """Write the prompts, by `kvkeep eval --export`."""
    import mlx_lm
    from kvkeep_side import prompts_of

    export = options.folder / "export.jsonl"
    subprocess.run(
        [*_kvkeep_eval(options), "--export", str(export)], check=True, stdout=subprocess.DEVNULL
    )
    with export.open(encoding="utf-8") as file:
        header = json.loads(file.readline())
    about = {"seed": header["seed"], "prose": header["prose"], "length": options.tokens}
    tokenizer = mlx_lm.utils.load_tokenizer(model)
    write_prompts(options.folder / "prompts.jsonl", about, prompts_of(export, tokenizer))


def _kvkeep_eval(options: argparse.Namespace) -> list[str]:
    return [
        *(sys.executable, "-m", "kvkeep", "eval", "--model", "demo"),
        *("--tasks", options.tasks, "--lengths", str(options.tokens)),
        *("--limit", str(options.prompts), "--seed", str(options.seed)),
    ]


def commands(options: argparse.Namespace, model: Path) -> dict[str, dict[str, list[str]]]:
    """What to run, by phase and side."""
    folder, prompts = options.folder, options.folder / "prompts.jsonl"
    files = ["--prompts", str(prompts), "--model", str(model)]
    rounds = ["--rounds", str(options.rounds), "--wanted"]
    kvpress = [str(options.kvpress), str(HERE / "kvpress_side.py")]
    velox = [str(options.velox), str(HERE / "velox_side.py")]
    blas = ["--blas", str(HERE.parents[1] / "src/kvkeep/blas.py")]

    def out(name: str) -> list[str]:
        return ["--out", str(folder / name)]

    policies = ",".join(planned.ours for planned in (*PAIRS, *OWN))
    eval_flags = ["--policies", policies, "--budgets", ",".join(BUDGETS), "--json"]
    answers = {
        "kvkeep": [
            *_kvkeep_eval(options),
            *eval_flags,
            *("--output", str(folder / "kvkeep.jsonl")),
        ],
        "kvpress": [*kvpress, "answers", *files, *out("kvpress.jsonl")],
        "velox": [*velox, "answers", *files, *blas, *out("velox.jsonl")],
    }
    pairs = [pair.name for pair in PAIRS]
    own = [setting.name for setting in OWN]
    methods = [velox.name for velox in VELOX]
    rows = {
        "kvkeep": [
            *(sys.executable, str(HERE / "kvkeep_side.py"), "rows", *files),
            *out("kvkeep-rows.npz"),
        ],
        "kvpress": [*kvpress, "rows", *files, *out("kvpress-rows.npz")],
    }
    timings = {
        "kvkeep": [
            *(sys.executable, str(HERE / "kvkeep_side.py"), "timings", *files),
            *out("kvkeep-times.json"),
            *rounds,
            *timed([*pairs, *own]),
        ],
        "kvpress": [
            *kvpress,
            "timings",
            *files,
            *out("kvpress-times.json"),
            *rounds,
            *timed(pairs),
        ],
        "velox": [
            *(*velox, "timings", *files, *blas, *out("velox-times.json")),
            *rounds,
            *timed(methods),
        ],
    }
    skipped = {"kvpress": options.kvpress, "velox": options.velox}
    phases = {"answers": answers, "rows": rows, "timings": timings}
    for phase in phases.values():
        for side, python in skipped.items():
            if python is None:
                phase.pop(side, None)
    return phases


def timed(names: list[str]) -> list[str]:
    """SETTING=BUDGET of all at one budget, of a few at every one."""
    return [
        f"{name}={budget}"
        for name in names
        for budget in BUDGETS
        if budget == BUDGET or name in SPREAD
    ]


def run(sides: dict[str, list[str]], together: bool, folder: Path) -> dict[str, str]:
    """Run each side's process, one after another or at once with a thread each.

    Returns:
        The end of what a side that failed has said, by side. Kvkeep's own failure is raised.
    """
    environment = dict(os.environ)
    if together:  # two processes with two threads each would wait for each other's
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    started: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    for side, command in sides.items():
        log = folder / f"{side}.log"
        threads = ["--threads", "1"] if together and side == "kvpress" else []
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*command, *threads], stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        started[side] = process, log
        if not together:
            process.wait()
    failed = {}
    for side, (process, log) in started.items():
        if process.wait():
            failed[side] = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    if "kvkeep" in failed:
        sys.exit(f"kvkeep's own side failed:\n{failed['kvkeep']}")
    return failed


def gathered(options: argparse.Namespace, failed: dict[str, str]) -> Report:
    """All that is in the folder."""
    folder: Path = options.folder
    header, prompts = read_prompts(folder / "prompts.jsonl", options.prompts)
    scores, versions = {"kvkeep": judged(own_answers(folder / "kvkeep.jsonl"), prompts)}, {}
    with (folder / "kvkeep.jsonl").open(encoding="utf-8") as file:
        versions["kvkeep"] = json.loads(file.readline())
    for side in ("kvpress", "velox"):
        if (path := folder / f"{side}.jsonl").exists():
            versions[side], answers = read(path)
            scores[side] = judged(answers, prompts)
    times = {}
    for side in ("kvkeep", "kvpress", "velox"):
        if (path := folder / f"{side}-times.json").exists():
            times[side] = read_timings(path)
    kept = {}
    for side in ("kvkeep", "kvpress"):
        if (path := folder / f"{side}-rows.npz").exists():
            kept[side] = read_rows(path)
    notes = "" if options.notes is None else options.notes.read_text(encoding="utf-8")
    return Report(
        date=options.date,
        command=f"make peers PEERS_FLAGS='{_told(options)}'",
        prompts=prompts,
        header=header,
        scores=scores,
        versions=versions,
        times=times,
        kept=kept,
        failed=failed,
        notes=notes,
    )


def _told(options: argparse.Namespace) -> str:
    """The flags that say what was asked."""
    return (
        f"--prompts {options.prompts} --tokens {options.tokens} --seed {options.seed}"
        f" --rounds {options.rounds}{' --together' if options.together else ''}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    import datetime

    parser = argparse.ArgumentParser(description="kvkeep beside its peers.")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per task")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of kvkeep eval, one turn each")
    parser.add_argument("--tokens", type=int, default=LENGTH, help="tokens of a prompt")
    parser.add_argument("--seed", type=int, default=SEED, help="of the prompts")
    parser.add_argument("--rounds", type=int, default=3, help="times per setting")
    parser.add_argument("--kvpress", type=Path, help="its environment's Python; left out without")
    parser.add_argument("--velox", type=Path, help="likewise for veloxquant-mlx")
    parser.add_argument("--together", action="store_true", help="ask all sides at once")
    parser.add_argument("--no-timings", action="store_true", help="only answers")
    parser.add_argument("--report-only", action="store_true", help="only write the report anew")
    parser.add_argument("--notes", type=Path, help="Markdown to put into the report")
    parser.add_argument("--folder", type=Path, default=Path("build/peers"), help="what a run keeps")
    parser.add_argument("--report", type=Path, help="report (default: report.md in the folder)")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser.add_argument("--date", default=today, help="of the report (default: today)")
    options = parser.parse_args(arguments)
    if options.prompts < 1 or options.tokens < 300:
        parser.error("--prompts must be at least 1, --tokens at least 300")
    if options.report is None:
        options.report = options.folder / "report.md"
    return options


if __name__ == "__main__":
    sys.exit(main())
