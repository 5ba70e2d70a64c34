"""Builds the optional native queue; everything else stands in pyproject.toml.

VLLM_COMMEXT_BUILD_NATIVE chooses: ``auto`` (default) leaves the extension out, and says so,
where it cannot be compiled; ``1`` makes that an error; ``0`` does not try.
"""

import json
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).parent
SOURCE = "csrc/shm_ring.c"
CHOICES = ("auto", "0", "1")


def native_choice() -> str:
    choice = os.environ.get("VLLM_COMMEXT_BUILD_NATIVE", "auto")
    if choice not in CHOICES:
        raise SystemExit(
            f"VLLM_COMMEXT_BUILD_NATIVE: expected one of {', '.join(CHOICES)}, got {choice!r}"
        )
    return choice


class BuildNative(build_ext):
    """Compiles the native queue, or leaves it out and writes down why for `vllm-commext doctor`."""

    def run(self) -> None:
        reason = self._compile()
        built = not reason
        if not built:
            self.warn(f"the native shared-memory queue is left out: {reason}")
            self.extensions = []
        self._write_down(built, reason)

    def _compile(self) -> str:
        """Why the extension was not built; empty where it was."""
        choice = native_choice()
        if choice == "0":
            return "VLLM_COMMEXT_BUILD_NATIVE=0"
        try:
            super().run()
        except (BaseError, CCompilerError, OSError) as error:
            if choice == "1":
                raise
            return f"it could not be compiled ({' '.join(str(error).split())})"
        return ""

    def _write_down(self, built: bool, reason: str) -> None:
        in_place = self.inplace or self.editable_mode
        folder = (ROOT if in_place else Path(self.build_lib)) / "vllm_commext" / "shm"
        folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps({"built": built, "reason": reason})
        (folder / "_native_build.json").write_text(record + "\n")


class BdistWheel(bdist_wheel):
    """A wheel without the extension holds nothing native, so it must not carry a platform tag."""

    def run(self) -> None:
        build = self.get_finalized_command("build_ext")
        self.run_command("build_ext")
        if not build.extensions:
            self.distribution.ext_modules = []
            self.root_is_pure = True
            self.py_limited_api = False
        super().run()


setup(
    ext_modules=[
        Extension(
            "vllm_commext.shm._shm_ring",
            sources=[SOURCE],
            depends=sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/*.h")),
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": BdistWheel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
