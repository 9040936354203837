"""Reads a package's source from a wheel, a folder, or the installed package."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

_VERSION = re.compile(r"^(?:Version: |__version__ = version = ['\"])([^'\"\s]+)", re.MULTILINE)
INSTALLED = "installed"


class SourceError(Exception):
    """There is no source to read, or it belongs to another package."""


class PackageSource(ABC):
    """The Python files of one package, by dotted module name. ``label`` is shown to users."""

    def __init__(self, package: str, label: str) -> None:
        self.package = package
        self.label = label

    @abstractmethod
    def read(self, path: str) -> str | None:
        """The text at a path such as ``vllm/config/cache.py``; ``None`` if there is none."""

    @abstractmethod
    def paths(self) -> Iterator[str]:
        """All paths of Python files."""

    def version(self) -> str:
        """The version of the package. Raises ``SourceError``."""
        for path in self._version_files():
            found = _VERSION.search(self.read(path) or "")
            if found:
                return found[1]
        raise SourceError(f"{self.label}: no version of {self.package} found in it")

    def _version_files(self) -> Iterator[str]:
        yield f"{self.package}/_version.py"


class Wheel(PackageSource):
    """A wheel, which is read without unpacking it."""

    def __init__(self, package: str, path: Path) -> None:
        super().__init__(package, path.name)
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise SourceError(f"{path}: not a wheel that can be read: {error}") from error
        self._names = frozenset(self._zip.namelist())
        if f"{package}/__init__.py" not in self._names:
            raise SourceError(f"{path}: has no package {package}")

    def read(self, path: str) -> str | None:
        return self._zip.read(path).decode() if path in self._names else None

    def paths(self) -> Iterator[str]:
        yield from sorted(name for name in self._names if name.endswith(".py"))

    def _version_files(self) -> Iterator[str]:
        yield from (name for name in self._names if name.endswith(".dist-info/METADATA"))
        yield from super()._version_files()


class Folder(PackageSource):
    """A folder that contains the package's folder."""

    def __init__(self, package: str, folder: Path, label: str = "") -> None:
        super().__init__(package, label or str(folder))
        self.folder = folder
        if not (folder / package / "__init__.py").is_file():
            raise SourceError(f"{folder}: has no package {package}")

    def read(self, path: str) -> str | None:
        try:
            return (self.folder / path).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def paths(self) -> Iterator[str]:
        for file in sorted((self.folder / self.package).rglob("*.py")):
            yield file.relative_to(self.folder).as_posix()


def open_source(where: str, package: str = "vllm") -> PackageSource:
    """The source at a path, or of the installed package. Raises ``SourceError``."""
    if where == INSTALLED:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise SourceError(f"{package} is not installed")
        return Folder(package, Path(spec.origin).parents[1], f"{package} as installed")
    path = Path(where)
    if path.is_dir():
        return Folder(package, path.parent if path.name == package else path)
    if not path.exists():
        raise SourceError(
            f"{where}: there is no such file. Give a wheel, a folder with the package {package}, "
            f"or the word {INSTALLED}"
        )
    return Wheel(package, path)


def ours() -> PackageSource:
    """The source of kvtiers itself."""
    return Folder("offload", Path(__file__).resolve().parents[3], "our own source")
