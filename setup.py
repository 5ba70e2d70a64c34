"""Builds the optional native queue and installs the CUDA sources inside the package; everything
else stands in pyproject.toml.

VLLM_COMMEXT_BUILD_NATIVE chooses: ``auto`` (default) leaves the extension out, and says so,
where it cannot be compiled; ``1`` makes that an error; ``0`` does not try.
"""

import gzip
import json
import os
import sysconfig
import tarfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import BaseError, CCompilerError, SetupError

ROOT = Path(__file__).parent
SOURCE = "csrc/shm/ring.c"
CUDA_SOURCES = "csrc/cuda/*"
CHOICES = ("auto", "0", "1")
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


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
        if FREE_THREADED:
            reason = "free-threaded Python has no limited API; take one with the GIL for the queue"
            if choice == "1":
                raise SetupError(reason)
            return reason
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


class BuildPackage(build_py):
    """Brings the CUDA sources along; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source, target in self._cuda_sources().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._cuda_sources().values()]

    def _cuda_sources(self) -> dict[str, str]:
        """Each file's place in the checkout, and in what is installed."""
        folder = Path(self.build_lib) / "vllm_commext"
        names = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(CUDA_SOURCES))
        return {name: str(folder / name) for name in names}


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


class Sdist(sdist):
    """Under SOURCE_DATE_EPOCH, an archive whose bytes depend on nothing but its files."""

    def make_archive(
        self,
        base_name: str,
        format: str,  # noqa: A002 - setuptools' own name
        root_dir: str | None = None,
        base_dir: str | None = None,
        owner: str | None = None,
        group: str | None = None,
    ) -> str:
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar" or base_dir is None:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        path = f"{base_name}.tar.gz"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with (
            open(path, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=lambda member: _anonymous(member, int(epoch)))
        return path


def _anonymous(member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """The member without its owner and time, and with the access rights of any checkout."""
    member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


setup(
    ext_modules=[
        Extension(
            "vllm_commext.shm._shm_ring",
            sources=[SOURCE],
            depends=sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/shm/*.h")),
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            # No debug information: it would hold the path of the folder that it was built in.
            extra_compile_args=["-std=c11", "-O2", "-g0", "-Wall", "-Wextra"],
            py_limited_api=not FREE_THREADED,
        )
    ],
    cmdclass={
        "build_ext": BuildNative,
        "build_py": BuildPackage,
        "bdist_wheel": BdistWheel,
        "sdist": Sdist,
    },
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
