"""Wheels for a machine with a GPU, torch and no network.

    python benchmarks/gpu/wheels.py [--python 3.12] [--have pyarrow,rich] [--most-mib 60]    gather them here
    python benchmarks/gpu/wheels.py --install                                               unpack them there, into site/

What is gathered is what ``needs.txt`` says and what those need, in the versions of constraints.txt where it names one, for
Linux on x86-64. torch and numpy are taken to be there; so is what ``--have`` names. ``python benchmarks/gpu`` puts ``site/`` in
front of the machine's own packages; nothing of the machine is changed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHEELS, SITE, NEEDS, CONSTRAINTS = (
    HERE / "wheels",
    HERE / "site",
    HERE / "needs.txt",
    HERE.parents[1] / "constraints.txt",
)
FOR = WHEELS / "python.txt"
"""The Python that they are for."""
THERE = {"torch", "numpy"}
"""What the machine is taken to have."""
ALONE = ("tokenizers>=0.20",)
"""Gathered without what they ask for: that serves downloads, which there are none of."""
GLIBC = (17, 27, 28)
"""manylinux_2_N tags that are taken: glibc 2.28 is of 2018."""
LARGEST = 5


def main() -> int:
    """Gather, or install."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--have", default="", help="packages that the machine has too, comma between")
    parser.add_argument("--most-mib", type=float, default=60.0, help="fail above so much")
    parser.add_argument("--install", action="store_true", help="unpack what was gathered")
    options = parser.parse_args()
    if options.install:
        return install()
    gather(options.python)
    dropped = {plain(name) for name in options.have.split(",") if name} | THERE
    for wheel in WHEELS.glob("*.whl"):
        if plain(wheel.name.split("-")[0]) in dropped:
            wheel.unlink()
    return weigh(options.most_mib)


def gather(python: str) -> None:
    """All wheels into an empty folder."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64"]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [part for tag in tags for part in ("--platform", tag)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(WHEELS)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(without_torch(CONSTRAINTS.read_text()))
        constraints.flush()
        command += ["--constraint", constraints.name, *target]
        subprocess.run([*command, "--requirement", str(NEEDS)], check=True)
        subprocess.run([*command, "--no-deps", *ALONE], check=True)
    FOR.write_text(python)


def without_torch(constraints: str) -> str:
    """Its version is the machine's business."""
    return "\n".join(line for line in constraints.splitlines() if plain(re.split(r"[<>=!~\s]", line)[0]) not in THERE)


def plain(name: str) -> str:
    """A distribution's name as an index compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def weigh(most_mib: float) -> int:
    """Say what they take; 1 when that is too much."""
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in WHEELS.glob("*.whl")}
    whole = sum(sizes.values())
    print(f"{len(sizes)} wheels, {whole:.1f} MiB of {most_mib:g}, in {WHEELS}")
    largest = sorted(sizes, key=lambda name: -sizes[name])[:LARGEST]
    for name in largest:
        print(f"  {sizes[name]:6.1f} MiB  {name}")
    if whole <= most_mib:
        return 0
    print("too much: leave out what the machine has (--have pyarrow,...), or raise --most-mib", file=sys.stderr)
    return 1


def install() -> int:
    """Unpack the wheels into ``site/``; without any, the machine's own packages must do."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if not wheels:
        return 0
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if FOR.exists() and FOR.read_text() != here:
        print(f"the wheels are for Python {FOR.read_text()}, this is {here}: they are left alone")
        return 0
    if SITE.exists() and SITE.stat().st_mtime > max(Path(wheel).stat().st_mtime for wheel in wheels):
        return 0
    shutil.rmtree(SITE, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    done = subprocess.run([*command, "--no-compile", "--target", str(SITE), *wheels], check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
