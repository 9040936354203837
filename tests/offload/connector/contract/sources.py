"""Sources for the tests of the contract: made from text, and real ones with replaced text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offload.connector.contract.source import PackageSource


class Texts(PackageSource):
    """Files given as text."""

    def __init__(self, package: str, files: Mapping[str, str]) -> None:
        super().__init__(package, f"texts of {package}")
        self.files = dict(files)

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def paths(self) -> Iterator[str]:
        yield from sorted(self.files)


class Edited(PackageSource):
    """Another source with replaced texts; each old text must exist."""

    def __init__(
        self, whole: PackageSource, edits: Mapping[str, tuple[tuple[str, str], ...]]
    ) -> None:
        super().__init__(whole.package, f"{whole.label}, edited")
        self._whole = whole
        self._edited = {}
        for path, changes in edits.items():
            text = whole.read(path) or ""
            for old, new in changes:
                assert old in text, f"{path} has no {old!r}"
                text = text.replace(old, new)
            self._edited[path] = text

    def read(self, path: str) -> str | None:
        return self._edited.get(path, self._whole.read(path))

    def paths(self) -> Iterator[str]:
        yield from self._whole.paths()
